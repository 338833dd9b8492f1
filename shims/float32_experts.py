"""Refuse experts in float32 on a CPU with AMX, which vLLM 0.27 does not run."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import InputError
from eagle3compat.patching import Patcher
from eagle3compat.settled import settle
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_ID = "float32-experts"
_EXPERTS = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
_RAISES = "raise RuntimeError(self._grouped_gemm_alignment_error("


def _probe(facts: Facts) -> Finding:
    calls = facts.calls(GENERATOR, "vllm.config.VllmConfig")
    if not calls:
        return Finding(Status.DRIFT, "VllmConfig is not called")
    line = calls[0].line
    text, source = facts.source_text(_EXPERTS), facts.source_of(_EXPERTS)
    if text is None and source is not None and source.is_opaque(_EXPERTS):
        return Finding(Status.DRIFT, f"no text of {_EXPERTS} to be read", None, line)
    if text is None or _RAISES not in text:
        return Finding(Status.NOT_NEEDED, "experts run in any dtype on a CPU", None, line)
    if "dtype == torch.bfloat16" not in text or "_is_amx_tile_supported()" not in text:
        return Finding(
            Status.DRIFT, f"{_EXPERTS} turns experts down in a way that is not known", None, line
        )
    return Finding(
        Status.NEEDED,
        "on a CPU with AMX, experts in another dtype than bfloat16 are turned down",
        "the platform, the model and its dtype; settled when the engine's config is built",
        line,
    )


def _install(module: ModuleType, patcher: Patcher) -> None:
    def configure(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        import torch
        from vllm.platforms import current_platform

        model = kwargs["model_config"]
        is_turned_down = (
            current_platform.is_cpu()
            and torch.cpu._is_amx_tile_supported()
            and model.get_num_experts() > 0
            and model.dtype != torch.bfloat16
        )
        if is_turned_down:
            raise InputError(
                f"dtype: expected bfloat16, in which alone this vLLM runs a model with experts on "
                f"a CPU with AMX; found {model.dtype}. Choose bfloat16, a CPU without AMX, or "
                "vLLM 0.26 or 0.28."
            )
        settle(_ID, "these experts run here")
        return wrapped(*args, **kwargs)

    patcher.wrap(module, "VllmConfig", configure)


SHIM = Shim(
    id=_ID,
    title="experts in float32 on a CPU with AMX are refused",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator._create_vllm_config",
            f"{_EXPERTS}.CPUFusedMOE.check_grouped_gemm",
            "experts that run in the model's dtype",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.27,<0.28",
    probe=_probe,
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why=(
        "vLLM 0.27 raises when the weights are loaded, and blames the experts' sizes. Before, and "
        "from 0.28 on, it runs them without AMX."
    ),
    upstream="none: found here, and gone in vLLM 0.28, which has other code for experts on a CPU",
    mended_in="vLLM 0.28.0",
    remove_when="vLLM 0.27 is no longer supported",
    after=("cpu-norm",),
)
