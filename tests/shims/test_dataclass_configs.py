"""dataclass-configs: transformers' generated constructor does not stand before speculators' own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from probing import Builds
from standins import carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.dataclass_configs import SHIM

BASE = "speculators.config"
DRAFT = "speculators.models.eagle3.config"
CONFIGS = "transformers.configuration_utils"
ANCHOR = "class PretrainedConfig("


def with_generated_constructors(builds: Builds) -> Builds:
    text = f"cls = wrap_init_to_accept_kwargs(cls)\n{ANCHOR}"
    return builds.edited(CONFIGS, ANCHOR, text)


def test_needed_where_constructors_are_generated(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        assert builds.probe(SHIM).status is Status.NOT_NEEDED
        finding = with_generated_constructors(builds).probe(SHIM)
        assert finding.status is Status.NEEDED
        line = builds.text(BASE).splitlines()[(finding.line or 0) - 1]
        assert "PydanticClassRegistryMixin.__init__(" in line


def test_drift_where_the_constructor_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(BASE, "for field in self.__class__.model_fields:", "for field in ():"),
        installed.without(BASE),
        installed.without_text(BASE),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def config_module(complete: bool) -> ModuleType:
    class Base:
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

    class Config(Base):
        __pydantic_complete__ = complete
        rebuilt: Any = None

        def __init__(self, **fields: Any) -> None:
            raise AttributeError("__pydantic_fields_set__")

        def validate(self, value: Any) -> None: ...

        @classmethod
        def model_rebuild(cls, **options: Any) -> None:
            cls.rebuilt = options
            cls.__pydantic_complete__ = True

    return module_with(DRAFT, SpeculatorModelConfig=Base, Eagle3SpeculatorConfig=Config)


def test_the_consumers_own_constructor_is_called() -> None:
    with carried_out(module := config_module(complete=True), SHIM.id):
        made = module.Eagle3SpeculatorConfig(draft_vocab_size=3)
        made.validate()
    assert made.fields == {"draft_vocab_size": 3}
    assert made.rebuilt is None


def test_an_incomplete_schema_is_built_with_torch_at_hand() -> None:
    torch = pytest.importorskip("torch")
    module = config_module(complete=False)
    config = module.Eagle3SpeculatorConfig
    before = dict(vars(config))
    with carried_out(module, SHIM.id):
        made = [config(), config()]
        rebuilt = config.rebuilt
        # As it was, for the comparison behind this block.
        config.rebuilt, config.__pydantic_complete__ = before["rebuilt"], False
    assert len(made) == 2
    assert rebuilt == {"force": True, "_types_namespace": {"torch": torch}}
