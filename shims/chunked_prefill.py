"""Let a request live until its whole prompt is computed, not only its first chunk."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import GENERATE_030, GENERATE_040
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status


def _install(module: ModuleType, patcher: Patcher) -> None:
    def derive(base: Any) -> type:
        class SchedulerOfWholePrompts(base):  # type: ignore[misc]
            def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
                ids: Iterable[str] = [request_ids] if isinstance(request_ids, str) else request_ids
                whole = [name for name in ids if _computed(self.requests.get(name))]
                return super().finish_requests(whole, finished_status)

        return SchedulerOfWholePrompts

    patcher.extend(module, "Scheduler", derive)


def _computed(request: Any) -> bool:
    """Whether every prompt token is computed; vLLM counts them when it schedules them."""
    return request is not None and request.num_computed_tokens >= request.num_prompt_tokens


SHIM = Shim(
    id="chunked-prefill",
    title="requests live until their whole prompt is computed",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.generate",
            "vllm.v1.core.sched.scheduler.Scheduler.finish_requests",
            "prompts that fit into one step",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=">=0.11",
    probe=known_function(
        GENERATOR,
        "VllmHiddenStatesGenerator.generate",
        {
            GENERATE_030: Finding(Status.NEEDED, "every scheduled request is aborted at once"),
            GENERATE_040: Finding(Status.NOT_NEEDED, "requests are aborted when all are done"),
        },
        "self.scheduler.finish_requests",
    ),
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why=(
        "When a batch exceeds the token budget of a step, the request that is cut there loses its "
        "remaining rows, and later requests get other requests' rows."
    ),
    upstream="https://github.com/vllm-project/speculators/pull/283 (mends speculators#279)",
    mended_in="speculators 0.4.0",
    remove_when="speculators 0.3 is no longer supported",
    silent=True,
    after=("scheduler-block-size",),
)
