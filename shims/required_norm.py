"""Refuse a verifier whose final norm is not found, instead of training without it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import VERIFIER_PARTS_030, VERIFIER_PARTS_040
from eagle3compat.errors import Refusal
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import DRAFT_MODEL, Contract, Finding, Patch, Process, Shim, Stage, Status
from eagle3compat.verifier_parts import FINAL_NORM

_SET_UP = "Eagle3DraftModel._setup_embeddings_and_lm_heads"


def _install(module: ModuleType, patcher: Patcher) -> None:
    def load_model_layers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return _checked(wrapped, *args, **kwargs)

    patcher.wrap(module, "load_model_layers", load_model_layers)


def _checked(load: Any, layer_names: list[str], model_path: str) -> Any:
    found = load(layer_names, model_path)
    if FINAL_NORM in layer_names and FINAL_NORM not in found:
        raise Refusal(
            model_path,
            f"a tensor {FINAL_NORM}, alone or below a prefix",
            "none",
            "Without the verifier's final norm a draft would learn wrong targets.",
        )
    return found


SHIM = Shim(
    id="required-norm",
    title="a verifier without a final norm is refused",
    contracts=(
        Contract(
            DRAFT_MODEL,
            _SET_UP,
            "safetensors.safe_open",
            "model.norm.weight of the verifier",
        ),
    ),
    consumers=">=0.4.0,<0.5",
    expected=None,
    probe=known_function(
        DRAFT_MODEL,
        _SET_UP,
        {
            VERIFIER_PARTS_030: Finding(Status.NOT_NEEDED, "no norm is loaded: see target-norm"),
            VERIFIER_PARTS_040: Finding(Status.NEEDED, "a missing norm is warned of, and left out"),
        },
        "Could not find final norm weights",
    ),
    patches=(Patch(DRAFT_MODEL, _install),),
    process=Process.PARENT,
    why="A draft that is trained on targets without the final norm is trained in vain.",
    upstream="none: the warning is meant, and trains a draft that is of no use",
    mended_in="no release of speculators 0.4",
    remove_when="speculators 0.4 is no longer supported",
    silent=True,
    after=("verifier-weights",),
    stages=(Stage.TRAINING,),
)
