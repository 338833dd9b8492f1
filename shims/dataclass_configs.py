"""Make a draft's config by speculators' own constructor, not by transformers' generated one."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.consumer_texts import MAKE_CONFIG
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import Contract, Finding, Patch, Process, Shim, Stage, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_BASE = "speculators.config"
_DRAFT = "speculators.models.eagle3.config"
_CONFIGS = "transformers.configuration_utils"
_GENERATED = "cls = wrap_init_to_accept_kwargs(cls)"

_known = known_function(
    _BASE,
    "SpeculatorModelConfig.__init__",
    {MAKE_CONFIG: Finding(Status.NEEDED, "transformers gives each config class a constructor")},
    "PydanticClassRegistryMixin.__init__(",
)


def _probe(facts: Facts) -> Finding:
    finding = _known(facts)
    text = facts.source_text(_CONFIGS)
    if finding.status is Status.NEEDED and (text is None or _GENERATED not in text):
        return replace(
            finding,
            status=Status.NOT_NEEDED,
            reason="config classes keep the constructor they have",
        )
    return finding


def _install(module: ModuleType, patcher: Patcher) -> None:
    config, base = module.Eagle3SpeculatorConfig, module.SpeculatorModelConfig

    def construct(self: Any, **fields: Any) -> None:
        if not config.__pydantic_complete__:
            import torch

            config.model_rebuild(force=True, _types_namespace={"torch": torch})
        base.__init__(self, **fields)

    def validate(self: Any) -> None:
        """transformers asks before it saves; pydantic checked the fields when they were set."""

    patcher.replace(config, "__init__", construct)
    patcher.replace(config, "validate", validate)


SHIM = Shim(
    id="dataclass-configs",
    title="draft configs made by speculators' own constructor",
    contracts=(
        Contract(
            _BASE,
            "SpeculatorModelConfig.__init__",
            f"{_CONFIGS}.PreTrainedConfig",
            "a base class that leaves its subclasses their constructor",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=None,
    probe=_probe,
    patches=(Patch(_DRAFT, _install),),
    process=Process.PARENT,
    transformers=">=5.5",
    why=(
        "From transformers 5.5 on, configs are dataclasses with a generated constructor, which "
        "fails on speculators' pydantic ones: has no attribute __pydantic_fields_set__."
    ),
    upstream="https://github.com/huggingface/transformers/pull/41250 (configs become dataclasses)",
    mended_in="no release of speculators 0.3 or 0.4",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    stages=(Stage.TRAINING,),
)
