"""Compute rotary embeddings on the CPU with vLLM's own PyTorch code, not its kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.patching import Patcher
from eagle3compat.probes import Probe
from eagle3compat.settled import settle
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_ID = "cpu-rotary"


def can_turn_off(module: str, op: str, reason: str) -> Probe:
    """A probe: needed for that reason, and drift where the custom op cannot be turned off.

    Args:
        module: vLLM's module that registers it.
        op: its name there.
        reason: what is wrong with its kernel.
    """

    def probe(facts: Facts) -> Finding:
        calls = facts.calls(GENERATOR, "vllm.config.VllmConfig")
        signature = facts.signature("vllm.config.VllmConfig")
        if not calls or signature is None or not signature.names("compilation_config"):
            return Finding(Status.DRIFT, "VllmConfig is not called, or has no compilation_config")
        line = calls[0].line
        text = facts.source_text(module)
        if text is None or f'CustomOp.register("{op}")' not in text:
            return Finding(Status.DRIFT, f"{op} is no custom op that can be turned off", None, line)
        return Finding(
            Status.NEEDED,
            reason,
            "whether the platform is the CPU; settled when the engine's config is built",
            line,
        )

    return probe


def turn_off(shim_id: str, op: str, what: str) -> Callable[[ModuleType, Patcher], None]:
    """An ``install`` that turns one of vLLM's custom ops off where the platform is the CPU.

    Args:
        shim_id: the shim that notes what was chosen.
        op: the switch, such as ``-rotary_embedding``.
        what: what runs by forward_native then.
    """

    def install(module: ModuleType, patcher: Patcher) -> None:
        def configure(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            from vllm.platforms import current_platform

            if not current_platform.is_cpu():
                settle(shim_id, "not a CPU: left alone")
                return wrapped(*args, **kwargs)
            settle(shim_id, f"a CPU: {what} by forward_native")
            from vllm.config import CompilationConfig

            compilation = kwargs.get("compilation_config") or CompilationConfig()
            if op not in compilation.custom_ops:
                compilation.custom_ops.append(op)
            return wrapped(*args, **kwargs | {"compilation_config": compilation})

        patcher.wrap(module, "VllmConfig", configure)

    return install


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
    probe=can_turn_off(
        "vllm.model_executor.layers.rotary_embedding.base",
        "rotary_embedding",
        "the CPU kernel gives wrong rotations to a strided query or key",
    ),
    patches=(Patch(GENERATOR, turn_off(_ID, "-rotary_embedding", "rotary embeddings")),),
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
