"""The worker extension of a streaming extraction: rows are written where they are computed.

Imported in vLLM's workers alone, after the shims: its base is speculators' own extension.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from speculators.data_generation.custom_worker import HiddenStatesWorkerExtension

from eagle3compat.errors import Refusal
from eagle3compat.kimi.exchange import Announced, Answer, Opened, StreamSettings
from eagle3compat.kimi.manifest import Proof, allowed_shortfall
from eagle3compat.kimi.state_writer import StateWriter
from eagle3compat.shims.layer_order import in_asked_order
from eagle3compat.shims.request_order import Chunk, Witness, batch_order, in_batch_order

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
        self, announced: Sequence[Announced], next_tokens: Sequence[tuple[str, int]]
    ) -> Answer:
        """Learn of requests, prove samples that were written, and say what was written since.

        Args:
            announced: requests of the next steps.
            next_tokens: request ids of written samples and the tokens that the engine sampled.
        """
        proofs = self._prove(next_tokens) if next_tokens else {}
        if self._stream_writer is None:
            return Answer()
        self._stream_writer.announce(announced)
        written, waiting, failure = self._stream_writer.collect()
        return Answer(written, proofs, waiting, failure)

    def _close_stream(self) -> None:
        """Wait for the writers; whatever they wrote is in the next answer."""
        if self._stream_writer is not None:
            self._stream_writer.close()

    def _store_captured_states(self, aux_hidden_states: list[Tensor]) -> None:
        announced, self._chunks = self._chunks, []
        if not announced:
            return  # vLLM warms up, or runs a dummy batch
        chunks = in_batch_order(batch_order(self.model_runner), announced)
        self._witness.check(chunks)
        if self._stream_writer is not None:
            asked = in_asked_order(self._asked_layer_ids, aux_hidden_states)
            self._stream_writer.take(chunks, asked)

    def _prove(self, next_tokens: Sequence[tuple[str, int]]) -> dict[str, Proof]:
        """The next tokens that written states give, through the model's own norm and lm_head.

        Every rank of a tensor parallel group has a part of lm_head, so all of them compute.
        """
        group = self._tensor_parallel_group
        runner = self.model_runner
        request_ids = [request_id for request_id, _ in next_tokens]
        if self._stream_writer is not None:
            states = self._stream_writer.last_states(request_ids).to(runner.device)
        else:
            shape = (len(next_tokens), self._stream_settings.hidden_size)
            states = torch.empty(shape, dtype=runner.model_config.dtype, device=runner.device)
        if group.world_size > 1:
            states = group.broadcast(states, src=0)
        with torch.inference_mode():
            logits = runner.model.compute_logits(self._decoder.norm(states))
        if self._stream_writer is None:
            return {}
        dtype = _name(states.dtype)
        return {
            request_id: _proof(row, token, dtype)
            for (request_id, token), row in zip(next_tokens, logits.float().cpu(), strict=True)
        }


def _proof(logits: Tensor, next_token: int, dtype: str) -> Proof:
    top = int(logits.argmax())
    finite = logits[torch.isfinite(logits)]
    largest = float(finite.abs().max()) if len(finite) else float("nan")
    shortfall = float(logits[top] - logits[next_token])
    return Proof(next_token, top, shortfall, allowed_shortfall(dtype, largest))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lock_for_writing(path: Path) -> Any:
    """Lock a file for as long as this process lives.

    Args:
        path: made if it is not there.

    Returns:
        What holds the lock; keep it.

    Raises:
        Refusal: another process has it for longer than `LOCK_PATIENCE`.
    """
    stream = path.open("ab")
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            raise Refusal(
                str(path),
                "no other worker that writes to this folder",
                "one that holds the lock",
                "End the engine of the earlier run, then run this again.",
            ) from None
        return stream
