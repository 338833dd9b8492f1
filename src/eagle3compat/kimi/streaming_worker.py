"""The worker extension of a streaming extraction: rows are written where they are computed.

Imported in vLLM's workers alone, after the shims: its base is speculators' own extension.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from speculators.data_generation.custom_worker import HiddenStatesWorkerExtension

from eagle3compat.errors import Refusal
from eagle3compat.kimi.awaited import Awaited, on_device
from eagle3compat.kimi.exchange import Announced, Answer, Opened, Step, StreamSettings
from eagle3compat.kimi.manifest import Proof, allowed_shortfall
from eagle3compat.kimi.state_writer import StateWriter
from eagle3compat.kimi.storage import try_lock
from eagle3compat.shims.layer_order import in_asked_order
from eagle3compat.shims.request_order import (
    Chunk,
    Testimony,
    Witness,
    batch_order,
    in_batch_order,
)

if TYPE_CHECKING:
    from torch import Tensor

# Seconds: a worker whose parent was killed writes what it has in hand, and ends.
LOCK_PATIENCE = 60.0


class StreamingWorkerExtension(HiddenStatesWorkerExtension):  # type: ignore[misc]
    """Hands each step's rows to a writer instead of keeping them for a reply."""

    # Set by the shims' own _setup_hidden_states_capture and _expect_chunks.
    _chunks: list[Chunk]
    _asked_layer_ids: list[int]
    _witness: Witness

    def _open_stream(self, settings: StreamSettings) -> Opened:
        """Make ready to write. Called in every worker; the first of the group writes."""
        from vllm.distributed import get_tp_group

        runner = self.model_runner
        dtype: torch.dtype = runner.model_config.dtype
        self._stream_settings = settings
        self._tensor_parallel_group = get_tp_group()
        self._decoder = next(
            part for part in runner.model.modules() if vars(part).get("_extension") is self
        )
        self._testimonies: list[list[Awaited | None]] = []
        self._sampling: list[_Sampling] = []
        self._proving = _Proving([])
        self._stream_writer: StateWriter | None = None
        if self._tensor_parallel_group.rank_in_group == 0:
            self._stream_lock = lock_for_writing(Path(settings.lock))
            self._stream_writer = StateWriter(
                unfinished=Path(settings.unfinished),
                layers=len(self._asked_layer_ids),
                hidden_size=settings.hidden_size,
                dtype=dtype,
                device=torch.device(runner.device),
                threads=settings.threads,
                cores=settings.cores,
                slabs=settings.slabs,
                tokens_a_step=settings.tokens_a_step,
                last_layer=settings.last_layer,
            )
        return Opened(_name(dtype), self._why_unprovable())

    def _why_unprovable(self) -> str | None:
        if self._stream_settings.last_layer is None:
            return "the verifier's last layer is not among the layers"
        for owner, name in ((self._decoder, "norm"), (self.model_runner.model, "compute_logits")):
            if not callable(getattr(owner, name, None)):
                return f"{type(owner).__name__} has no {name}"
        return None

    def _exchange_stream(
        self,
        announced: Sequence[Announced],
        next_tokens: Sequence[tuple[str, int]],
        steps: Sequence[Step],
    ) -> Answer:
        """Compute a round, and say what earlier ones gave.

        What is asked of the device here is waited for in the next exchange, when it has the next
        round to compute.

        Args:
            announced: requests that are to be written in these steps.
            next_tokens: request ids of written samples, and the tokens that the engine sampled.
                Their proofs are in the next answer.
            steps: in their order.

        Raises:
            Refusal: the rows of an earlier step were not the announced ones.
        """
        sampling, self._sampling = self._sampling, []
        testimonies, self._testimonies = self._testimonies, []
        proving, self._proving = self._proving, self._prove(next_tokens)
        # Not a sample of these steps is told of before their testimonies are heard.
        written, failure = self._stream_writer.collect() if self._stream_writer else ([], None)
        if self._stream_writer:
            self._stream_writer.announce(announced)
        for step in steps:
            self._expect_chunks(step.chunks)
            self._sampling.append(_Sampling(self._whole_step(step.scheduler_output), step.ending))
        for verdicts in testimonies:
            Testimony(*(each and bool(each.value()) for each in verdicts)).check()
        sampled = {name: token for each in sampling for name, token in each.next_tokens().items()}
        return Answer(written, sampled, proving.proofs(), failure)

    def _whole_step(self, scheduler_output: Any) -> Any:
        output = self.execute_model(scheduler_output)
        return self.sample_tokens(None) if output is None else output

    def _close_stream(self) -> None:
        """End the writers, and free what they held."""
        if self._stream_writer is not None:
            self._stream_writer.close()
            self._stream_writer = None
            self._stream_lock.close()

    def _store_captured_states(self, aux_hidden_states: list[Tensor]) -> None:
        announced, self._chunks = self._chunks, []
        if not announced:
            return  # vLLM warms up, or runs a dummy batch
        chunks = in_batch_order(batch_order(self.model_runner), announced)
        testimony = self._witness.testify(chunks)
        verdicts = (testimony.token_ids_differ, testimony.positions_differ)
        self._testimonies.append([None if each is None else Awaited(each) for each in verdicts])
        if self._stream_writer is not None:
            asked = in_asked_order(self._asked_layer_ids, aux_hidden_states)
            self._stream_writer.take(chunks, asked)

    def _prove(self, next_tokens: Sequence[tuple[str, int]]) -> _Proving:
        """Start to compute next tokens from written states, by the model's own norm and lm_head.

        Every rank of a tensor parallel group has a part of lm_head, so all of them compute.
        """
        if not next_tokens:
            return _Proving([])
        group = self._tensor_parallel_group
        runner = self.model_runner
        if self._stream_writer is not None:
            request_ids = [request_id for request_id, _ in next_tokens]
            states = on_device(self._stream_writer.last_states(request_ids), runner.device)
        else:
            shape = (len(next_tokens), self._stream_settings.hidden_size)
            states = torch.empty(shape, dtype=runner.model_config.dtype, device=runner.device)
        if group.world_size > 1:
            states = group.broadcast(states, src=0)
        with torch.inference_mode():
            logits = runner.model.compute_logits(self._decoder.norm(states))
            if self._stream_writer is None:
                return _Proving([])
            judged = [Awaited(each) for each in _judged(logits, next_tokens)]
            return _Proving(next_tokens, _name(states.dtype), *judged)


def _judged(logits: Tensor, next_tokens: Sequence[tuple[str, int]]) -> tuple[Tensor, Tensor]:
    """Of each row ``[vocabulary]``: the top token, int64; the shortfall and largest logit.

    Returns:
        ``[n]`` and ``[n, 2]``, on the device of the logits.
    """
    values = logits.float()
    tokens = on_device(torch.tensor([token for _, token in next_tokens]), logits.device)
    highest, top = values.max(dim=-1)
    shortfall = highest - values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    # Entries beyond the vocabulary are padded with minus infinity.
    largest = torch.where(torch.isinf(values), 0.0, values.abs()).amax(dim=-1)
    return top, torch.stack([shortfall, largest], dim=-1)


@dataclass(frozen=True)
class _Sampling:
    """What a step sampled, as the device will know.

    Args:
        output: vLLM's ``ModelRunnerOutput``, or, with asynchronous scheduling, what gives it.
        ending: request ids of the prompts that ended in the step.
    """

    output: Any
    ending: set[str]

    def next_tokens(self) -> dict[str, int]:
        """The greedy next token of each prompt, by request id; waits for the device."""
        asynchronous = hasattr(self.output, "get_output")
        output = self.output.get_output() if asynchronous else self.output
        rows = output.req_id_to_index
        return {each: int(output.sampled_token_ids[rows[each]][0]) for each in self.ending}


@dataclass(frozen=True)
class _Proving:
    """Proofs that the device computes.

    Args:
        next_tokens: request ids, and the tokens that the engine sampled.
        dtype: of the states.
        top: token with the largest logit, ``[n]``.
        figures: its distance from the sampled one's, and the largest absolute logit, ``[n, 2]``.
    """

    next_tokens: Sequence[tuple[str, int]]
    dtype: str = ""
    top: Awaited | None = None
    figures: Awaited | None = None

    def proofs(self) -> dict[str, Proof]:
        """The proofs, by request id; waits for the device."""
        if self.top is None or self.figures is None:
            return {}
        top, figures = self.top.value().tolist(), self.figures.value().tolist()
        rows = zip(self.next_tokens, top, figures, strict=True)
        return {
            request_id: Proof(token, top_token, shortfall, allowed_shortfall(self.dtype, largest))
            for (request_id, token), top_token, (shortfall, largest) in rows
        }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lock_for_writing(path: Path) -> Any:
    """Lock a file until it is closed, or this process ends.

    Args:
        path: made if it is not there.

    Returns:
        What holds the lock; keep it.

    Raises:
        Refusal: another process has it for longer than `LOCK_PATIENCE`.
    """
    stream = path.open("ab")
    deadline = time.monotonic() + LOCK_PATIENCE
    while not try_lock(stream):
        if time.monotonic() > deadline:
            raise Refusal(
                str(path),
                "no other worker that writes to this folder",
                "one that holds the lock",
                "End the engine of the earlier run, then run this again.",
            )
        time.sleep(0.2)
    return stream
