"""Drives the engine of speculators' generator so that its workers write the hidden states.

Samples are computed in *groups* that fill one step of the engine, or, for a prompt that is longer
than a step, several. A group starts when the one before it is computed and its memory is free, so
which samples share a step is decided by the data set alone: a rerun of a group gives the same bits.

What a step computes does not depend on what earlier ones sampled. So steps are scheduled ahead, and
several go to the workers in one call, a *round*: the device does not wait for this process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from types import ModuleType
from typing import Any

from eagle3compat.errors import InterruptedRun, Refusal
from eagle3compat.kimi.account import Account, Settled
from eagle3compat.kimi.dataset import Sample
from eagle3compat.kimi.exchange import Announced, Answer, Opened, Step, StreamSettings, Written
from eagle3compat.kimi.manifest import Proof, input_digest
from eagle3compat.shims.request_order import StepChunks

GENERATE = "speculators.data_generation.vllm_hidden_states_generator.VllmHiddenStatesGenerator"
# Seconds between questions while nothing is left to compute.
PATIENCE = 0.005
GROUPS_A_ROUND = 4
_STREAMS = count()


def in_groups(
    indices: Iterable[int], lengths: Sequence[int], tokens: int, sequences: int
) -> Iterator[list[int]]:
    """Samples that are computed together, in their order.

    Args:
        indices: of the samples.
        lengths: tokens of every sample of the data set.
        tokens: that a step takes. A longer sample is a group of its own.
        sequences: that a step takes.
    """
    group: list[int] = []
    filled = 0
    for index in indices:
        if group and (filled + lengths[index] > tokens or len(group) == sequences):
            yield group
            group, filled = [], 0
        group.append(index)
        filled += lengths[index]
    if group:
        yield group


@dataclass(frozen=True)
class _Request:
    """A sample, ready to be computed.

    Args:
        index: number of the sample.
        request_id: vLLM's id.
        sample: read from the data set.
        digest: of its input.
        wanted: whether it is to be written.
    """

    index: int
    request_id: str
    sample: Sample
    digest: str
    wanted: bool

    def announced(self) -> Announced:
        """What the worker is told of it."""
        return Announced(self.request_id, self.index, bytes(self.sample.loss_mask))


@dataclass(frozen=True)
class _Round:
    """Steps that go to the workers together, and the requests to be written in them."""

    wanted: list[_Request]
    steps: list[Step]


class Stream:
    """An engine whose workers write what they compute.

    Args:
        generator: of speculators, with `streaming_worker.StreamingWorkerExtension` in its workers.
        module: the generator's.
        settings: for the worker that writes.
        account: of the samples that are written.

    Raises:
        Refusal: another process still writes to the folder.
    """

    def __init__(
        self, generator: Any, module: ModuleType, settings: StreamSettings, account: Account
    ) -> None:
        self._executor = generator.executor
        self._account = account
        self._planner = _Planner(generator, module)
        opened: Opened = self._ask("_open_stream", settings)
        self.dtype = opened.dtype
        self.unprovable = opened.unprovable
        # By request id: what is announced, what the engine sampled for it, and what is written.
        self._announced: dict[str, _Request] = {}
        self._next_tokens: dict[str, int] = {}
        self._written: dict[str, Written] = {}
        self._proving: dict[str, Written] = {}

    def extract(
        self, groups: Iterable[list[int]], samples: Sequence[Sample], todo: Set[int]
    ) -> None:
        """Compute groups, and have what is to do in them written.

        Args:
            groups: from `in_groups`.
            samples: of the data set.
            todo: numbers of the samples to write. The others of a group are computed beside them,
                since what shares a step decides the last bits.

        Raises:
            Refusal: the engine cannot compute them.
            InterruptedRun: a worker died, or files cannot be written.
        """
        groups = iter(groups)

        def plan() -> _Round:
            return self._planner.plan(islice(groups, GROUPS_A_ROUND), samples, todo)

        # The next round is read and scheduled beside the engine, in one thread alone.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner") as planner:
            following = planner.submit(plan)
            while (planned := following.result()).steps:
                following = planner.submit(plan)
                self._exchange(planned)

    def drain(self) -> None:
        """Return when everything that was computed is written and proved.

        Raises:
            InterruptedRun: a worker died, or files cannot be written.
        """
        self._exchange(_Round([], []))
        while self._announced:
            time.sleep(PATIENCE)
            self._exchange(_Round([], []))
        self._account.check()

    def close(self) -> None:
        """End the writers in the worker, after `drain`."""
        self._ask("_close_stream")

    def _exchange(self, planned: _Round) -> None:
        """Have a round computed, hear what earlier ones gave, and have that proved.

        The device is not waited for: what was sampled, and what is proved, comes an exchange later.
        """
        self._announced.update((each.request_id, each) for each in planned.wanted)
        ready = self._written.keys() & self._next_tokens.keys()
        proving = {request_id: self._written.pop(request_id) for request_id in sorted(ready)}
        answer: Answer = self._ask(
            "_exchange_stream",
            [each.announced() for each in planned.wanted],
            [(request_id, self._next_tokens[request_id]) for request_id in proving],
            planned.steps,
        )
        for request_id, proof in answer.proofs.items():
            self._settle(self._proving.pop(request_id), proof)
        self._proving.update(proving)
        for request_id in answer.sampled.keys() & self._announced.keys():
            self._next_tokens[request_id] = answer.sampled[request_id]
        for written in answer.written:
            if written.fault is None and self.unprovable is None:
                self._written[written.request_id] = written
            else:
                self._settle(written, None)
        if answer.failure is not None:
            raise InterruptedRun(
                f"the hidden states cannot be written ({answer.failure}). What is done stays done: "
                "mend it, then run this again."
            )

    def _settle(self, written: Written, proof: Proof | None) -> None:
        request = self._announced.pop(written.request_id)
        self._next_tokens.pop(written.request_id, None)
        self._account.settle(Settled(written, proof, request.sample.line, request.digest))

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method in every worker; the answer is that of the first of the group."""
        try:
            return self._executor.collective_rpc(method, args=args)[0]
        except Exception as error:
            # Set by the thread of vLLM that watches the workers.
            if getattr(self._executor, "is_failed", False):
                raise InterruptedRun(
                    "a worker of vLLM died (out of memory, or killed?). What is done stays done: "
                    "run this again."
                ) from error
            raise


class _Planner:
    """Schedules groups, ahead of the engine.

    Args:
        generator: whose scheduler it uses, alone.
        module: the generator's.
    """

    def __init__(self, generator: Any, module: ModuleType) -> None:
        self._module = module
        self._scheduler = generator.scheduler
        self._eos_token_id = generator.tokenizer.eos_token_id
        self._chunks = StepChunks()
        # vLLM tells workers of a request's end with the next step: its id is free only then.
        self._name = f"stream_{next(_STREAMS)}"

    def plan(
        self, groups: Iterable[list[int]], samples: Sequence[Sample], todo: Set[int]
    ) -> _Round:
        """Read and schedule groups; see `Stream.extract`."""
        planned = _Round([], [])
        for group in groups:
            requests = [
                self._prepared(index, samples[index], wanted=index in todo) for index in group
            ]
            planned.wanted.extend(request for request in requests if request.wanted)
            planned.steps.extend(self._steps([self._request(request) for request in requests]))
        return planned

    def _prepared(self, index: int, sample: Sample, *, wanted: bool) -> _Request:
        digest = input_digest(sample.input_ids, sample.loss_mask)
        return _Request(index, f"{self._name}_{index}", sample, digest, wanted)

    def _steps(self, requests: list[Any]) -> Iterator[Step]:
        for request in requests:
            self._scheduler.add_request(request)
        left = requests
        while left:
            output = self._scheduler.schedule()
            if not output.total_num_scheduled_tokens:
                raise _too_small(left)
            left = [each for each in left if each.num_computed_tokens < each.num_prompt_tokens]
            ending = {each.request_id for each in requests} - {each.request_id for each in left}
            yield Step(output, self._chunks.of(output), ending & output.num_scheduled_tokens.keys())
        ids = [request.request_id for request in requests]
        self._scheduler.finish_requests(ids, self._module.RequestStatus.FINISHED_ABORTED)

    def _request(self, request: _Request) -> Any:
        # As in generate(), so that the shims that mend that call mend this one.
        return self._module.Request(
            request_id=request.request_id,
            prompt_token_ids=list(request.sample.input_ids),
            sampling_params=self._module.SamplingParams(max_tokens=1, temperature=0.0),
            pooling_params=None,
            eos_token_id=self._eos_token_id,
            arrival_time=0.0,
        )


def _too_small(left: list[Any]) -> Refusal:
    longest = max(request.num_prompt_tokens for request in left)
    return Refusal(
        GENERATE,
        "every prompt computed when the scheduler has nothing more to do",
        f"{len(left)} that cannot be scheduled, the longest of {longest} tokens",
        "The KV cache is too small for a prompt: leave it out, or give the cache more memory "
        "(VLLM_CPU_KVCACHE_SPACE on a CPU).",
    )
