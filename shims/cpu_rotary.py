"""Compute rotary embeddings on the CPU with vLLM's own PyTorch code, not its kernel."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.patching import Patcher
from eagle3compat.settled import settle
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_ID = "cpu-rotary"
_OFF = "-rotary_embedding"


def _probe(facts: Facts) -> Finding:
    calls = facts.calls(GENERATOR, "vllm.config.VllmConfig")
    signature = facts.signature("vllm.config.VllmConfig")
    if not calls or signature is None or not signature.names("compilation_config"):
        return Finding(Status.DRIFT, "VllmConfig is not called, or has no compilation_config")
    line = calls[0].line
    text = facts.source_text("vllm.model_executor.layers.rotary_embedding.base")
    if text is None or 'CustomOp.register("rotary_embedding")' not in text:
        return Finding(
            Status.DRIFT, "the rotary embedding is no custom op that can be turned off", None, line
        )
    return Finding(
        Status.NEEDED,
        "the CPU kernel gives wrong rotations to a strided query or key",
        "whether the platform is the CPU; settled when the engine's config is built",
        line,
    )


def _install(module: ModuleType, patcher: Patcher) -> None:
    def configure(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            settle(_ID, "not a CPU: left alone")
            return wrapped(*args, **kwargs)
        settle(_ID, "a CPU: rotary embeddings by forward_native")
        from vllm.config import CompilationConfig

        compilation = kwargs.get("compilation_config") or CompilationConfig()
        if _OFF not in compilation.custom_ops:
            compilation.custom_ops.append(_OFF)
        return wrapped(*args, **kwargs | {"compilation_config": compilation})

    patcher.wrap(module, "VllmConfig", configure)


SHIM = Shim(
    id=_ID,
    title="rotary embeddings on the CPU by forward_native",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator._create_vllm_config",
            "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.forward_cpu",
            "right rotations",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=_probe,
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why=(
        "With MLA disabled, states differ from the model's by 10 to 100 % from the first layer "
        "on, for prompts of two tokens or more. It is a fault of vLLM's CPU kernel; its own "
        "switch for custom ops avoids it, so that vLLM is not patched."
    ),
    upstream=(
        "https://github.com/vllm-project/vllm/pull/18046 (tensor slices reach the kernels), "
        "https://github.com/vllm-project/vllm/pull/31643 (the same switch in eager mode)"
    ),
    mended_in="no release of vLLM so far",
    remove_when="the oldest supported vLLM rotates strided tensors rightly on the CPU",
    silent=True,
)
