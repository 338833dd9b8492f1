"""Set vLLM's current config round each step: some layers make custom ops while they run."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.patching import Patcher
from eagle3compat.shim import WORKER, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_SET = "vllm.config.set_current_vllm_config"


def _probe(facts: Facts) -> Finding:
    if facts.signature(_SET) is None:
        return Finding(Status.DRIFT, f"no signature of {_SET} to be read")
    return Finding(
        Status.NEEDED,
        "vLLM sets its current config while it loads a model, not while it runs it",
        "whether a layer makes a custom op while it runs; the config is set for every step",
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
            _SET,
            "layers that ask for no config while they run",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=_probe,
    patches=(Patch(WORKER, _install),),
    process=Process.WORKER,
    why=(
        "Experts on a CPU make their activation in a step, in vLLM 0.14 and from 0.20 to 0.24: an "
        "AssertionError that the current vLLM config is not set."
    ),
    upstream="none: each time mended in vLLM with another change of its CPU kernels",
    mended_in="vLLM 0.25.0, for the layers known",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    after=("model-forward",),
)
