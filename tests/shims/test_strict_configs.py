"""strict-configs: pydantic looks into transformers' configs, and torch is not bound there."""

from __future__ import annotations

from typing import Any

import pytest
from probing import Builds
from standins import carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.strict_configs import SHIM, annotates_with_unbound_torch

SCHEMAS = "speculators.utils.pydantic_utils"
CONFIGS = "transformers.configuration_utils"
REBUILD = "cls.model_rebuild(force=True)"


def with_field(builds: Builds, field: str) -> Builds:
    anchor = '    model_type: str = ""\n'
    return builds.edited(CONFIGS, anchor, f"{anchor}    {field}\n")


def test_not_needed_where_annotations_name_nothing_unbound(
    installed: Builds, later: Builds
) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NOT_NEEDED
        assert REBUILD in builds.text(SCHEMAS).splitlines()[(finding.line or 0) - 1]


@pytest.mark.parametrize("annotation", ["torch.dtype | None", '"str | torch.dtype | None"'])
def test_needed_where_a_field_is_annotated_with_torch(installed: Builds, annotation: str) -> None:
    assert with_field(installed, f"dtype: {annotation} = None").probe(SHIM).status is Status.NEEDED


def test_not_needed_where_no_transformers_is_to_be_read(installed: Builds) -> None:
    assert installed.without(CONFIGS).probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_the_consumer_rebuilds_otherwise_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(SCHEMAS, REBUILD, "cls.model_rebuild()"),
        installed.without(SCHEMAS),
        installed.without_text(SCHEMAS),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_drift_where_the_configs_cannot_be_parsed(installed: Builds) -> None:
    assert installed.garbled(CONFIGS).probe(SHIM).status is Status.DRIFT


@pytest.mark.parametrize(
    ("text", "unbound"),
    [
        ("class PreTrainedConfig:\n    dtype: torch.dtype\n", True),
        ("class PretrainedConfig:\n    dtype: 'torch.dtype'\n", True),
        ("if TYPE_CHECKING:\n    import torch\nclass PreTrainedConfig:\n    d: 'torch.d'\n", True),
        ("import torch\nclass PreTrainedConfig:\n    dtype: torch.dtype\n", False),
        ("class PreTrainedConfig:\n    dtype: str\n", False),
        ("class OtherConfig:\n    dtype: torch.dtype\n", False),
        ("class PreTrainedConfig:\n    def f(self):\n        x: torch.dtype\n", False),
        ("", False),
    ],
)
def test_unbound_is_a_field_of_a_config_class_without_an_import(text: str, unbound: bool) -> None:
    assert annotates_with_unbound_torch(text) is unbound


def test_the_schema_is_rebuilt_with_torch_at_hand() -> None:
    torch = pytest.importorskip("torch")

    class Model:
        rebuilt: Any = None

        @classmethod
        def reload_schema(cls) -> None:
            raise AssertionError("the consumer's own was called")

        @classmethod
        def model_rebuild(cls, **options: Any) -> None:
            cls.rebuilt = options

    class Derived(Model):
        pass

    with carried_out(module := module_with(SCHEMAS, ReloadableBaseModel=Model), SHIM.id):
        Derived.reload_schema()
        assert module.ReloadableBaseModel is Model
    assert Derived.rebuilt == {"force": True, "_types_namespace": {"torch": torch}}
    assert Model.rebuilt is None


def test_pydantic_takes_the_namespace() -> None:
    """``_types_namespace`` begins with an underscore: it is held against the real pydantic."""
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel):  # type: ignore[misc]
        field: unbound.Kind  # type: ignore[name-defined]  # noqa: F821

        @classmethod
        def reload_schema(cls) -> None: ...

    Model.model_rebuild(force=True, _types_namespace={"unbound": module_with("unbound", Kind=int)})
    assert Model(field="3").field == 3
