"""Refuse DeepSeek models in float16: vLLM scales their residual stream down."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import InputError
from eagle3compat.patching import Patcher
from eagle3compat.settled import settle
from eagle3compat.shim import WORKER, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_ID = "float16-scaling"
_MODEL = "vllm.model_executor.models.deepseek_v2"


def _probe(facts: Facts) -> Finding:
    text = facts.source_text(_MODEL)
    if text is None:
        return Finding(Status.DRIFT, f"no source of {_MODEL} to be read")
    if "torch.float16" not in text:
        return Finding(Status.NOT_NEEDED, "DeepSeek layers treat float16 as any other dtype")
    if "residual *= 1.0 / self.routed_scaling_factor" not in text:
        return Finding(Status.DRIFT, "DeepSeek layers treat float16 in a way that is not known")
    return Finding(
        Status.NEEDED,
        "DeepSeek layers scale hidden states and residual in float16",
        "the model and its dtype; settled in the worker when capture is set up",
    )


def _install(module: ModuleType, patcher: Patcher) -> None:
    def set_up(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        config = instance.model_runner.model_config
        factor = getattr(config.hf_text_config, "routed_scaling_factor", None)
        if config.dtype is module.torch.float16 and factor not in (None, 1.0):
            raise InputError(
                f"dtype: expected bfloat16 or float32 for a model with routed_scaling_factor "
                f"{factor}, found float16, in which vLLM scales the hidden states. Choose the "
                "checkpoint's own dtype."
            )
        settle(_ID, f"{config.dtype}, routed_scaling_factor {factor}: not scaled")
        wrapped(*args, **kwargs)

    patcher.wrap(module.HiddenStatesWorkerExtension, "_setup_hidden_states_capture", set_up)


SHIM = Shim(
    id=_ID,
    title="DeepSeek models in float16 are refused",
    contracts=(
        Contract(
            WORKER,
            "HiddenStatesWorkerExtension._setup_hidden_states_capture",
            f"{_MODEL}.DeepseekV2DecoderLayer.forward",
            "a residual stream that is not scaled",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=_probe,
    patches=(Patch(WORKER, _install),),
    process=Process.WORKER,
    why="vLLM divides by routed_scaling_factor in float16, to keep within its range.",
    upstream="https://github.com/vllm-project/vllm/pull/13232 (why vLLM scales)",
    mended_in="no release of vLLM so far",
    remove_when="the oldest supported vLLM does not scale DeepSeek's residual stream",
    silent=True,
    after=("layer-order",),
)
