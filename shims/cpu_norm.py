"""Compute RMS norms on the CPU with vLLM's own PyTorch code, not its kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status
from eagle3compat.shims.cpu_rotary import turn_off

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_ID = "cpu-norm"
_NORM = "vllm.model_executor.layers.layernorm"


def _probe(facts: Facts) -> Finding:
    calls = facts.calls(GENERATOR, "vllm.config.VllmConfig")
    signature = facts.signature("vllm.config.VllmConfig")
    if not calls or signature is None or not signature.names("compilation_config"):
        return Finding(Status.DRIFT, "VllmConfig is not called, or has no compilation_config")
    line = calls[0].line
    text = facts.source_text(_NORM)
    if text is None or 'CustomOp.register("rms_norm")' not in text:
        return Finding(
            Status.DRIFT, "the RMS norm is no custom op that can be turned off", None, line
        )
    return Finding(
        Status.NEEDED,
        "a CPU kernel that is compiled may read strided rows as if they were contiguous",
        "whether the platform is the CPU; settled when the engine's config is built",
        line,
    )


SHIM = Shim(
    id=_ID,
    title="RMS norms on the CPU by forward_native",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator._create_vllm_config",
            f"{_NORM}.RMSNorm.forward_cpu",
            "right norms of strided rows",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=_probe,
    patches=(Patch(GENERATOR, turn_off(_ID, "-rms_norm", "RMS norms")),),
    process=Process.PARENT,
    why=(
        "DeepSeek and Kimi norm a slice of a wider row. vLLM 0.12.0's CPU kernel takes the slice "
        "for contiguous: from the second token on, states are off by about 100 %. Later kernels "
        "take strides; text cannot tell which kernel was compiled."
    ),
    upstream="none: found here, and mended in vLLM 0.14 with its kernel",
    mended_in="vLLM 0.14.0",
    remove_when="the oldest supported vLLM is 0.14",
    silent=True,
    after=("cpu-rotary",),
)
