"""Free each request when its prompt is done, and tell the workers of every one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import GENERATE_030, GENERATE_040
from eagle3compat.errors import Refusal
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status


def _install(module: ModuleType, patcher: Patcher) -> None:
    aborted = module.RequestStatus.FINISHED_ABORTED

    def derive(base: Any) -> type:
        class SchedulerThatFrees(base):  # type: ignore[misc]
            def schedule(self, *args: Any, **kwargs: Any) -> Any:
                done = [
                    request.request_id
                    for request in self.running
                    if request.num_computed_tokens >= request.num_prompt_tokens
                ]
                if done:
                    self.finish_requests(done, aborted)
                output = super().schedule(*args, **kwargs)
                if not output.total_num_scheduled_tokens:
                    # The generator does not execute this step: say it again in the next one.
                    self.finished_req_ids |= set(output.finished_req_ids)
                return output

        return SchedulerThatFrees

    def generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            results = wrapped(*args, **kwargs)
            _check_all_computed(instance.scheduler)
            return results
        except BaseException:
            _abort_all(instance.scheduler, aborted)
            raise

    patcher.extend(module, "Scheduler", derive)
    patcher.wrap(module.VllmHiddenStatesGenerator, "generate", generate)


def _check_all_computed(scheduler: Any) -> None:
    """Raise a ``Refusal`` where requests are left: the loop ends when none can be scheduled."""
    left = sorted(scheduler.requests)
    if left:
        raise Refusal(
            "speculators/data_generation/vllm_hidden_states_generator.py in generate",
            "every prompt computed when the scheduler has nothing more to do",
            f"{len(left)} that cannot be scheduled, among them {left[0]}",
            "The KV cache is too small for a prompt: shorten it, or give the cache more memory "
            "(gpu_memory_utilization; VLLM_CPU_KVCACHE_SPACE on a CPU).",
        )


def _abort_all(scheduler: Any, aborted: Any) -> None:
    """Leave nothing of a call that failed to the next one."""
    for request in tuple(scheduler.requests.values()):
        request.num_computed_tokens = max(request.num_computed_tokens, request.num_prompt_tokens)
    scheduler.finish_requests(tuple(scheduler.requests), aborted)


SHIM = Shim(
    id="finished-requests",
    title="requests are freed when their prompt is done",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.generate",
            "vllm.v1.core.sched.scheduler.Scheduler.schedule",
            "requests whose prompts are done making room for others, here and in the workers",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=known_function(
        GENERATOR,
        "VllmHiddenStatesGenerator.generate",
        {
            GENERATE_030: Finding(
                Status.NEEDED, "workers are never told of the requests of the last step"
            ),
            GENERATE_040: Finding(Status.NEEDED, "requests are freed when all are done"),
        },
        "self.scheduler.schedule()",
    ),
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why=(
        "In 0.4 a batch of more than 32 requests never gets past the first 32. In both, workers "
        "keep the last requests of every call for good, and a call that failed leaves its "
        "requests to the next. In 0.3 a prompt that the KV cache cannot hold, and all after it, "
        "come back with no rows at all."
    ),
    upstream="none: the generator was removed in speculators 0.5.0 before it was reported",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    after=("chunked-prefill",),
)
