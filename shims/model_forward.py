"""Capture beside the model's own forward pass instead of a copy of it that has aged."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import FORWARD_030, FORWARD_040
from eagle3compat.errors import Refusal
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import WORKER, Contract, Finding, Patch, Process, Shim, Status


def layer_state(layer: Any, output: Any) -> Any:
    """The hidden states after a decoder layer, [tokens, hidden size], as a tensor of its own.

    vLLM's layers answer with (hidden states, residual), whose sum the next layer's norm takes;
    some answer with the sum.

    Raises:
        Refusal: the layer answers in another shape.
    """
    if hasattr(output, "clone"):
        return output.clone()
    if isinstance(output, tuple) and len(output) == 2 and hasattr(output[0], "clone"):
        hidden_states, residual = output
        return hidden_states.clone() if residual is None else hidden_states + residual
    raise Refusal(
        f"the decoder layer {type(layer).__name__}",
        "hidden states, or hidden states and residual",
        f"{type(output).__name__}",
        "Hidden states of this model cannot be extracted in-process; please report its class.",
    )


def _install(module: ModuleType, patcher: Patcher) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own_forward = partial(type(self).forward, self, *args, **kwargs)
        # All ranks of a tensor parallel group compute the same states.
        if module.get_tp_group().rank_in_group != 0:
            return own_forward()
        states: dict[int, Any] = {}
        handles = [
            self.layers[layer_id].register_forward_hook(partial(_keep, states, layer_id))
            for layer_id in self._extension._layer_ids
        ]
        try:
            result = own_forward()
        finally:
            for handle in handles:
                handle.remove()
        self._extension._store_captured_states([states[layer_id] for layer_id in sorted(states)])
        return result

    patcher.replace(module, "_patched_forward", forward)


def _keep(states: dict[int, Any], layer_id: int, layer: Any, args: Any, output: Any) -> None:
    states[layer_id] = layer_state(layer, output)


_FOUND = Finding(
    Status.NEEDED,
    "the model's forward is replaced by one loop for all models",
    "what the model's own forward does besides; the model's own is called",
)

SHIM = Shim(
    id="model-forward",
    title="the model's own forward runs, layers are captured beside it",
    contracts=(
        Contract(
            WORKER,
            "_patched_forward",
            "vllm.model_executor.models.deepseek_v2.DeepseekV2Model.get_input_embeddings",
            "embeddings by get_input_embeddings, and a plain loop over the layers",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=known_function(
        WORKER,
        "_patched_forward",
        {FORWARD_030: _FOUND, FORWARD_040: _FOUND},
        "self.get_input_embeddings(input_ids)",
    ),
    patches=(Patch(WORKER, _install),),
    process=Process.WORKER,
    why=(
        "get_input_embeddings became embed_input_ids in vLLM 0.11.2: an AttributeError where no "
        "multimodal path supplies embeddings. And what a model's own forward does between its "
        "layers (scalings, per-layer arguments) would be left out without a word."
    ),
    upstream=(
        "https://github.com/vllm-project/vllm/pull/27583 (renames get_input_embeddings), "
        "https://github.com/vllm-project/speculators/pull/225 (follows it)"
    ),
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    silent=False,
)
