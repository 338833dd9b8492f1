"""Complete a step: since execute_model and sample_tokens were split, both must be called."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle3compat.patching import Patcher
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_EXECUTOR = "vllm.v1.executor.multiproc_executor.MultiprocExecutor"


def _probe(facts: Facts) -> Finding:
    steps = facts.calls(GENERATOR, f"{_EXECUTOR}.execute_model")
    if not steps:
        return Finding(Status.DRIFT, f"{_EXECUTOR}.execute_model is not called")
    line = steps[0].line
    if facts.calls(GENERATOR, f"{_EXECUTOR}.sample_tokens"):
        return Finding(Status.NOT_NEEDED, "the consumer calls sample_tokens itself", None, line)
    split = facts.has_member(_EXECUTOR, "sample_tokens")
    if split is None:
        return Finding(
            Status.DRIFT, "cannot tell whether the executor has sample_tokens", None, line
        )
    if not split:
        return Finding(Status.NOT_NEEDED, "execute_model does the whole step", None, line)
    return Finding(Status.NEEDED, "sample_tokens is never called", None, line)


def _install(module: ModuleType, patcher: Patcher) -> None:
    def derive(base: Any) -> type:
        class ExecutorWithWholeStep(base):  # type: ignore[misc]
            def execute_model(self, *args: Any, **kwargs: Any) -> Any:
                output = super().execute_model(*args, **kwargs)
                return super().sample_tokens(None) if output is None else output

        return ExecutorWithWholeStep

    patcher.extend(module, "MultiprocExecutor", derive)


SHIM = Shim(
    id="two-phase-step",
    title="sample_tokens completes each step",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.generate",
            f"{_EXECUTOR}.execute_model",
            "a whole step",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=">=0.11.2",
    probe=_probe,
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="The second step raises: sample_tokens() must be called after execute_model().",
    upstream=(
        "https://github.com/vllm-project/vllm/pull/26866 (splits the step), "
        "https://github.com/vllm-project/speculators/pull/225 (follows it)"
    ),
    mended_in="speculators 0.4.0",
    remove_when="speculators 0.3 is no longer supported",
)
