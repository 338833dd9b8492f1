"""Provide the module transformers.modeling_attn_mask_utils, which was removed, to speculators."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import Refusal
from eagle3compat.patching import LOADED_MODULES, Patcher
from eagle3compat.probes import line_of
from eagle3compat.shim import Contract, Finding, Patch, Process, Shim, Stage, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_EARLY = "speculators.utils.pydantic_utils"  # imported by speculators before its models
_MODELS = "speculators.models.eagle"
_MASKS = "transformers.modeling_attn_mask_utils"
_FUNCTION = "_prepare_4d_causal_attention_mask"


def _probe(facts: Facts) -> Finding:
    text = facts.source_text(_MODELS)
    if text is None:
        return Finding(Status.DRIFT, f"no source of {_MODELS} to be read")
    line = line_of(text, f"from {_MASKS} import")
    if line is None:
        return Finding(Status.NOT_NEEDED, f"the consumer does not import {_MASKS}")
    if facts.source_of(_MASKS) is None:
        return Finding(
            Status.NOT_NEEDED, "no transformers to be read; speculators imports it", None, line
        )
    masks = facts.source_text(_MASKS)
    if masks is None:
        return Finding(Status.NEEDED, f"transformers has no {_MASKS}", None, line)
    if line_of(masks, f"def {_FUNCTION}(") is None:
        return Finding(Status.DRIFT, f"{_MASKS} has no {_FUNCTION}", None, line)
    return Finding(Status.NOT_NEEDED, "transformers has the module", None, line)


def _install(module: ModuleType, patcher: Patcher) -> None:
    stand_in = ModuleType(_MASKS, "Stands in for a module that transformers removed.")
    vars(stand_in)[_FUNCTION] = _refuse
    patcher.replace(LOADED_MODULES, _MASKS, stand_in)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise Refusal(
        f"speculators/models/eagle.py in EagleSpeculator.forward [{_MASKS}.{_FUNCTION}]",
        "transformers with that module",
        "a transformers from which it was removed",
        "Drafts of the EAGLE-1 kind need transformers before 5.24; extraction and EAGLE-3 do not.",
    )


SHIM = Shim(
    id="attention-mask-module",
    title="stand-in for a removed module of transformers",
    contracts=(
        Contract(
            _MODELS, "EagleSpeculator.forward", f"{_MASKS}.{_FUNCTION}", "a module to import from"
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=_probe,
    patches=(Patch(_EARLY, _install),),
    process=Process.BOTH,
    transformers=">=5.23",
    why=(
        "import speculators raises ModuleNotFoundError: transformers.modeling_attn_mask_utils, "
        "which is gone from transformers 5.24; only the EAGLE-1 draft uses it."
    ),
    upstream="https://github.com/huggingface/transformers/pull/48476 (removes the old masks)",
    mended_in="no release of speculators 0.3 or 0.4",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    touches_provider=(
        "speculators imports the module by transformers' name: a stand-in is put into sys.modules, "
        "where other importers of that name find it too; its function refuses"
    ),
    stages=(Stage.EXTRACTION, Stage.TRAINING),
)
