"""Leave out eos_token_id where vLLM's Request no longer takes it."""

from __future__ import annotations

from types import ModuleType

from eagle3compat.patching import Patcher
from eagle3compat.probes import call_binds
from eagle3compat.shim import GENERATOR, Contract, Patch, Process, Shim

_TARGET = "vllm.v1.request.Request"


def _install(module: ModuleType, patcher: Patcher) -> None:
    # Requests of this route are aborted after their prefill: nothing looks for an end token.
    patcher.drop_argument(module, "Request", "eos_token_id")


SHIM = Shim(
    id="request-eos",
    title="Request without eos_token_id",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.generate",
            _TARGET,
            "its parameter eos_token_id",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.17",
    probe=call_binds(GENERATOR, _TARGET, drop=("eos_token_id",)),
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="The parameter was removed from vLLM: a TypeError.",
    upstream="https://github.com/vllm-project/vllm/pull/34435 (moves it to SamplingParams)",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
)
