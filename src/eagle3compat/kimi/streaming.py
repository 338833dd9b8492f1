"""Drives the engine of speculators' generator so that its workers write the hidden states.

Samples are computed in *groups* that fill one step of the engine, or, for a prompt that is longer
than a step, several. A group starts when the one before it is computed and its memory is free, so
which samples share a step is decided by the data set alone: a rerun of a group gives the same bits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import count
from types import ModuleType
from typing import Any

from eagle3compat.errors import Refusal
from eagle3compat.kimi.account import Account, Settled
from eagle3compat.kimi.dataset import Sample
from eagle3compat.kimi.exchange import Announced, Answer, Opened, StreamSettings, Written
from eagle3compat.kimi.manifest import input_digest

GENERATE = "speculators.data_generation.vllm_hidden_states_generator.VllmHiddenStatesGenerator"
# Seconds between questions while nothing is left to compute.
PATIENCE = 0.005
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
        self._generator = generator
        self._module = module
        self._account = account
        # vLLM tells workers of a request's end with the next step: its id is free only then.
        self._name = f"stream_{next(_STREAMS)}"
        self._scheduler = generator.scheduler
        self._executor = generator.executor
        opened: Opened = self._ask("_open_stream", settings)
        self.dtype = opened.dtype
        self.unprovable = opened.unprovable
        # Samples that are announced and not accounted for, by request id.
        self._samples: dict[str, tuple[int, str]] = {}
        self._next_tokens: dict[str, int] = {}
        self._unproved: deque[Written] = deque()

    def extract(self, group: Sequence[int], samples: Sequence[Sample], todo: Set[int]) -> None:
        """Compute a group, and have those of it that are to do written.

        Args:
            group: from `in_groups`.
            samples: one a member of the group.
            todo: members that are to be written; the others are computed beside them, since what
                shares a step decides the last bits.

        Raises:
            Refusal: the engine cannot compute them, or the writer cannot go on.
            OSError: a sample could not be put in its place.
        """
        announced = []
        for index, sample in zip(group, samples, strict=True):
            if index in todo:
                digest = input_digest(sample.input_ids, sample.loss_mask)
                self._samples[self._id(index)] = (sample.line, digest)
                announced.append(Announced(self._id(index), index, bytes(sample.loss_mask)))
        self._exchange(announced)
        requests = [
            self._request(index, sample) for index, sample in zip(group, samples, strict=True)
        ]
        for request in requests:
            self._scheduler.add_request(request)
        self._compute(requests)

    def drain(self) -> None:
        """Return when everything that was computed is written and proved.

        Raises:
            Refusal: the writer cannot go on.
        """
        while self._exchange([]).waiting or self._unproved:
            time.sleep(PATIENCE)
        self._account.check()

    def _id(self, index: int) -> str:
        return f"{self._name}_{index}"

    def _request(self, index: int, sample: Sample) -> Any:
        # As in generate(), so that the shims that mend that call mend this one.
        return self._module.Request(
            request_id=self._id(index),
            prompt_token_ids=list(sample.input_ids),
            sampling_params=self._module.SamplingParams(max_tokens=1, temperature=0.0),
            pooling_params=None,
            eos_token_id=self._generator.tokenizer.eos_token_id,
            arrival_time=0.0,
        )

    def _compute(self, requests: list[Any]) -> None:
        left = requests
        while left:
            step = self._scheduler.schedule()
            if not step.total_num_scheduled_tokens:
                raise _too_small(left)
            output = self._executor.execute_model(step)
            if output is None:
                output = self._executor.sample_tokens(None)
            ended = {
                request.request_id
                for request in left
                if request.num_computed_tokens >= request.num_prompt_tokens
            }
            self._next_tokens.update(_sampled(output, ended & self._samples.keys()))
            left = [request for request in left if request.request_id not in ended]
        ids = [request.request_id for request in requests]
        self._scheduler.finish_requests(ids, self._module.RequestStatus.FINISHED_ABORTED)

    def _exchange(self, announced: list[Announced]) -> Answer:
        proving = [] if self.unprovable else self._take_unproved()
        tokens = [(each.request_id, self._next_tokens.pop(each.request_id)) for each in proving]
        answer: Answer = self._ask("_exchange_stream", announced, tokens)
        for written in proving:
            self._settle(written, answer)
        for written in answer.written:
            if written.fault is None and not self.unprovable:
                self._unproved.append(written)
            else:
                self._settle(written, answer)
        if answer.failure is not None:
            raise Refusal(
                "the worker that writes the hidden states",
                "files that can be written",
                answer.failure,
                "What is done stays done: mend it, then run this again.",
            )
        return answer

    def _take_unproved(self) -> list[Written]:
        taken = list(self._unproved)
        self._unproved.clear()
        return taken

    def _settle(self, written: Written, answer: Answer) -> None:
        line, digest = self._samples.pop(written.request_id)
        self._next_tokens.pop(written.request_id, None)
        proof = answer.proofs.get(written.request_id)
        self._account.settle(Settled(written, proof, line, digest))

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method in every worker; the answer is that of the first of the group."""
        return self._executor.collective_rpc(method, args=args)[0]


def _sampled(output: Any, request_ids: set[str]) -> dict[str, int]:
    """Greedy next tokens out of vLLM's ``ModelRunnerOutput``."""
    return {
        request_id: int(output.sampled_token_ids[output.req_id_to_index[request_id]][0])
        for request_id in request_ids
    }


def _too_small(left: list[Any]) -> Refusal:
    longest = max(request.num_prompt_tokens for request in left)
    return Refusal(
        GENERATE,
        "every prompt computed when the scheduler has nothing more to do",
        f"{len(left)} that cannot be scheduled, the longest of {longest} tokens",
        "The KV cache is too small for a prompt: leave it out, or give the cache more memory "
        "(VLLM_CPU_KVCACHE_SPACE on a CPU).",
    )
