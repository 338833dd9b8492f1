"""Warm the workers up: since vLLM split that off, the generator does not."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.patching import Patcher
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_EXECUTOR = "vllm.v1.executor.multiproc_executor.MultiprocExecutor"
_WARM_UP = "compile_or_warm_up_model"


def _probe(facts: Facts) -> Finding:
    calls = facts.calls(GENERATOR, f"{_EXECUTOR}.initialize_from_config")
    line = calls[0].line if calls else None
    if facts.calls(GENERATOR, f"{_EXECUTOR}.{_WARM_UP}"):
        return Finding(Status.NOT_NEEDED, "the consumer warms the workers up itself", None, line)
    split = facts.has_member(_EXECUTOR, _WARM_UP)
    if split is None:
        return Finding(Status.DRIFT, f"cannot tell whether the executor has {_WARM_UP}", None, line)
    if not split:
        return Finding(Status.NOT_NEEDED, "initialize_from_config warms up", None, line)
    signature = facts.signature(f"{_EXECUTOR}.{_WARM_UP}")
    if signature is None or any(each.required for each in signature.parameters):
        return Finding(Status.DRIFT, f"{_WARM_UP} wants arguments that are not known", None, line)
    return Finding(Status.NEEDED, f"{_WARM_UP} is never called", None, line)


def _install(module: ModuleType, patcher: Patcher) -> None:
    def derive(base: Any) -> type:
        class ExecutorThatWarmsUp(base):  # type: ignore[misc]
            def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
                result = super().initialize_from_config(*args, **kwargs)
                self.compile_or_warm_up_model()
                return result

        return ExecutorThatWarmsUp

    patcher.extend(module, "MultiprocExecutor", derive)


SHIM = Shim(
    id="warm-up",
    title="workers are warmed up",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.__init__",
            f"{_EXECUTOR}.initialize_from_config",
            "workers that are ready when their KV cache is",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.27",
    probe=_probe,
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why=(
        "Kernels are tuned, buffers reserved and seeds set in the warm-up: left out, the first "
        "step does it, after the KV cache took the memory."
    ),
    upstream="none: vLLM's engine core calls both, of which the generator makes no use",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    after=("kv-cache-layout",),
)
