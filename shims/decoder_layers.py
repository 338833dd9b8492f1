"""Find the decoder layers of any verifier, below multimodal wrappers too."""

from __future__ import annotations

import types
from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import SET_UP_030, SET_UP_040
from eagle3compat.errors import Refusal
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.settled import settle
from eagle3compat.shim import WORKER, Contract, Finding, Patch, Process, Shim, Status

_ID = "decoder-layers"


def find_decoder(model: Any, layers: int) -> Any:
    """The module of ``model`` whose ``layers`` are the text model's decoder layers.

    Args:
        model: a vLLM model: a text model, or a wrapper round one.
        layers: number of decoder layers, from the text config.

    Raises:
        Refusal: nothing below the model has that many layers.
    """
    seen: list[Any] = []
    node = model
    while node is not None and all(node is not other for other in seen):
        seen.append(node)
        if _count(getattr(node, "layers", None)) == layers:
            return node
        node = _below(node)
    path = " -> ".join(type(other).__name__ for other in seen)
    raise Refusal(
        "speculators/data_generation/custom_worker.py in _setup_hidden_states_capture",
        f"a text model of {layers} decoder layers below {type(model).__name__}",
        f"none on the way {path}",
        "Hidden states of this model cannot be extracted in-process; please report its class.",
    )


def _count(layers: Any) -> int | None:
    try:
        return len(layers)
    except TypeError:
        return None


def _below(node: Any) -> Any:
    get_language_model = getattr(node, "get_language_model", None)
    if callable(get_language_model):
        inner = get_language_model()
        if inner is not node:
            return inner
    return next(
        (
            getattr(node, name)
            for name in ("language_model", "model")
            if getattr(node, name, None) is not None
        ),
        None,
    )


def _install(module: ModuleType, patcher: Patcher) -> None:
    def set_up(self: Any, layer_ids: list[int]) -> None:
        self._layer_ids = frozenset(layer_ids)
        self._captured_states = None
        text_config = self.model_runner.model_config.hf_text_config
        decoder = find_decoder(self.model_runner.model, text_config.num_hidden_layers)
        settle(_ID, f"{type(decoder).__name__} in {type(self.model_runner.model).__name__}")
        decoder._extension = self
        decoder.forward = types.MethodType(module._patched_forward, decoder)

    patcher.replace(module.HiddenStatesWorkerExtension, "_setup_hidden_states_capture", set_up)


SHIM = Shim(
    id=_ID,
    title="decoder layers found below multimodal wrappers",
    contracts=(
        Contract(
            WORKER,
            "HiddenStatesWorkerExtension._setup_hidden_states_capture",
            "vllm.model_executor.models.interfaces.supports_eagle3",
            "a model that declares SupportsEagle3 and holds its text model as .model",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=">=0.11",
    probe=known_function(
        WORKER,
        "HiddenStatesWorkerExtension._setup_hidden_states_capture",
        {
            SET_UP_030: Finding(
                Status.NEEDED,
                "only models with SupportsEagle3 and a .model are accepted",
                "the model's class; settled in the worker when capture is set up",
            ),
            SET_UP_040: Finding(
                Status.NOT_NEEDED, "the consumer goes through get_language_model itself"
            ),
        },
        "supports_eagle3(model)",
    ),
    patches=(Patch(WORKER, _install),),
    process=Process.WORKER,
    why=(
        "Kimi-K2.5's wrapper does not declare SupportsEagle3 through vLLM 0.17.1, and holds its "
        "text model one level further down."
    ),
    upstream="https://github.com/vllm-project/speculators/pull/228 (get_language_model)",
    mended_in="speculators 0.4.0",
    remove_when="speculators 0.3 is no longer supported",
)
