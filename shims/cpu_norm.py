"""Compute RMS norms on the CPU with vLLM's own PyTorch code, not its kernel."""

from __future__ import annotations

from eagle3compat.shim import GENERATOR, Contract, Patch, Process, Shim
from eagle3compat.shims.cpu_rotary import can_turn_off, turn_off

_ID = "cpu-norm"
_NORM = "vllm.model_executor.layers.layernorm"


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
    probe=can_turn_off(
        _NORM,
        "rms_norm",
        "a CPU kernel that is compiled may read strided rows as if they were contiguous",
    ),
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
