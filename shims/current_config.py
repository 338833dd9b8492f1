"""Set vLLM's current config round each step: some layers make custom ops while they run."""

from __future__ import annotations

import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.patching import Patcher
from eagle3compat.shim import WORKER, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_EXPERTS = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
_MADE_IN_A_STEP = re.compile(r"lambda \w+: SiluAndMul\(")


def _probe(facts: Facts) -> Finding:
    text = facts.source_text(_EXPERTS)
    if text is None or _MADE_IN_A_STEP.search(text) is None:
        return Finding(Status.NOT_NEEDED, "the CPU's experts make no custom op while they run")
    if facts.signature("vllm.config.set_current_vllm_config") is None:
        return Finding(Status.DRIFT, "no vllm.config.set_current_vllm_config to be read")
    return Finding(
        Status.NEEDED,
        "the CPU's experts make their activation, a custom op, in each step",
        "whether the model has experts and runs on a CPU; the config is set for every step",
    )


def _install(module: ModuleType, patcher: Patcher) -> None:
    def step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from vllm.config import set_current_vllm_config

        decoder = args[0]
        with set_current_vllm_config(decoder._extension.vllm_config):
            return wrapped(*args, **kwargs)

    patcher.wrap(module, "_patched_forward", step)


SHIM = Shim(
    id="current-config",
    title="vLLM's current config set in each step",
    contracts=(
        Contract(
            WORKER,
            "_patched_forward",
            f"{_EXPERTS}.CPUFusedMOE",
            "layers that ask for no config while they run",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.20,<0.25",
    probe=_probe,
    patches=(Patch(WORKER, _install),),
    process=Process.WORKER,
    why="AssertionError in the first step of a model with experts: Current vLLM config is not set.",
    upstream="none: mended in vLLM with another change of its CPU kernels",
    mended_in="vLLM 0.25.0",
    remove_when="the oldest supported vLLM is 0.25",
    after=("model-forward",),
)
