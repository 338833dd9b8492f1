"""Find the verifier's embeddings and head below a wrapper's prefix."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import LOAD_LAYERS_030, LOAD_LAYERS_040
from eagle3compat.errors import Refusal
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import DRAFT_MODEL, Contract, Finding, Patch, Process, Shim, Stage, Status
from eagle3compat.verifier_parts import EMBEDDINGS, stored_name, tensor_names

_LOADING = "speculators.utils.loading"


def _install(module: ModuleType, patcher: Patcher) -> None:
    def load_model_layers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return _load(wrapped, *args, **kwargs)

    patcher.wrap(module, "load_model_layers", load_model_layers)


def _load(load: Any, layer_names: list[str], model_path: str) -> dict[str, Any]:
    from speculators.utils import loading

    there = tensor_names(loading, model_path)
    stored = {name: stored_name(there, name, model_path) for name in layer_names}
    if EMBEDDINGS in stored and stored[EMBEDDINGS] is None:
        raise Refusal(
            model_path,
            f"a tensor {EMBEDDINGS}, alone or below a prefix",
            f"none among {len(there)} tensors",
            "Give the folder of the verifier's checkpoint.",
        )
    asked = {name: key for name, key in stored.items() if key is not None}
    found = load(list(asked.values()), model_path)
    return {name: found[key] for name, key in asked.items() if key in found}


SHIM = Shim(
    id="verifier-weights",
    title="verifier's embeddings and head found below a wrapper's prefix",
    contracts=(
        Contract(
            _LOADING,
            "load_model_layers",
            "safetensors.safe_open",
            "model.embed_tokens.weight and lm_head.weight, as a plain language model names them",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=None,
    probe=known_function(
        _LOADING,
        "load_model_layers",
        {
            LOAD_LAYERS_030: Finding(Status.NEEDED, "tensors are looked up by exact name"),
            LOAD_LAYERS_040: Finding(Status.NOT_NEEDED, "the end of a name is enough"),
        },
        "def load_model_layers",
    ),
    patches=(Patch(DRAFT_MODEL, _install),),
    process=Process.PARENT,
    why="Kimi-K2.5's tensors are named language_model.model.embed_tokens.weight and so on.",
    upstream="none: speculators 0.4.0 matches the end of a name",
    mended_in="speculators 0.4.0",
    remove_when="speculators 0.3 is no longer supported",
    stages=(Stage.TRAINING,),
)
