"""Writes hidden states in the process that holds them, beside the next forward pass.

A step's rows are copied to a *slab*, a buffer on the host, on a stream of their own; threads write
each sample's file when its last rows are there. The number of slabs bounds the memory. What is
measured of the rows (norms, checksums) is measured where they were computed, so that a later look
at the file (`audit`) also proves the copy and the write.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from eagle3compat.errors import Refusal
from eagle3compat.kimi.exchange import Announced, Written
from eagle3compat.kimi.manifest import layer_checksum
from eagle3compat.kimi.storage import sample_path, save_sample

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3compat.shims.request_order import Chunk

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slab:
    """Host memory for the rows of one step.

    Args:
        layers: how many layers are captured.
        tokens: rows that it can take.
        hidden_size: width of a row.
        dtype: of the states.
        device: where the states come from; memory is pinned where that speeds the copy.
    """

    def __init__(
        self, layers: int, tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        pinned = device.type == "cuda"
        self.states = torch.empty((layers, tokens, hidden_size), dtype=dtype, pin_memory=pinned)
        self.row_sums = torch.empty((layers, tokens), dtype=torch.int64, pin_memory=pinned)
        self.row_norms = torch.empty((layers, tokens), dtype=torch.float32, pin_memory=pinned)
        self.holders = 0
        self._stream = torch.cuda.Stream(device) if pinned else None
        self._event = torch.cuda.Event() if pinned else None

    def fill(self, states: Sequence[Tensor], tokens: int) -> None:
        """Start to copy the first rows of each layer.

        Args:
            states: one ``[at least tokens, H]`` tensor a layer.
            tokens: rows to copy; what follows them is padding.
        """
        if self._stream is None or self._event is None:
            self._copy(states, tokens)
            return
        self._stream.wait_stream(torch.cuda.current_stream(states[0].device))
        with torch.cuda.stream(self._stream):
            self._copy(states, tokens)
            for rows in states:
                rows.record_stream(self._stream)
            self._event.record(self._stream)

    def _copy(self, states: Sequence[Tensor], tokens: int) -> None:
        for layer, padded in enumerate(states):
            rows = padded[:tokens]
            bits = rows.view(_BITS[rows.element_size()])
            sums = bits.sum(dim=-1, dtype=torch.int64)
            norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
            self.row_sums[layer, :tokens].copy_(sums, non_blocking=True)
            self.row_norms[layer, :tokens].copy_(norms, non_blocking=True)
            self.states[layer, :tokens].copy_(rows, non_blocking=True)

    def wait(self) -> None:
        """Return when the copy is done."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(frozen=True)
class _Part:
    """Rows of one request in a slab."""

    slab: Slab
    start: int
    end: int


@dataclass
class _Sample:
    """What has been computed of one request."""

    announced: Announced
    prompt_length: int
    token_ids: list[int] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)

    def rows(self, name: str, layer: int) -> list[Tensor]:
        """One layer of what its slabs hold under a name, a tensor a part."""
        return [getattr(part.slab, name)[layer, part.start : part.end] for part in self.parts]


class _SlabPool:
    """A fixed number of slabs; more are made only where waiting for one would never end."""

    def __init__(self, make: _MakeSlab, count: int) -> None:
        self._make = make
        self._free = [make() for _ in range(count)]
        self._condition = threading.Condition()
        self._busy = 0

    def take(self) -> Slab:
        with self._condition:
            # Rows of prompts that go on in a later step hold slabs that no writer will free.
            self._condition.wait_for(lambda: self._free or not self._busy)
            slab = self._free.pop() if self._free else self._make()
            slab.holders = 1
            return slab

    def hold(self, slab: Slab) -> None:
        with self._condition:
            slab.holders += 1

    def release(self, slab: Slab) -> None:
        with self._condition:
            slab.holders -= 1
            if not slab.holders:
                self._free.append(slab)
            self._condition.notify_all()

    def writer_works(self, count: int) -> None:
        """Count samples that writers have in hand: they free slabs."""
        with self._condition:
            self._busy += count
            self._condition.notify_all()


class _MakeSlab(Protocol):
    def __call__(self) -> Slab: ...


class StateWriter:
    """Takes the rows of each step, and writes a file for each prompt whose rows are all there.

    Args:
        unfinished: folder for the files.
        layers: how many layers each step brings.
        hidden_size: width of a state.
        dtype: of the states.
        device: where they are computed.
        threads: writers.
        cores: for the writers, where states are computed on the CPU.
        slabs: buffers of one step's rows.
        tokens_a_step: rows that a step has at most.
        last_layer: which layer `last_states` will be asked for, of each sample without a fault;
            None where it will not be.
    """

    def __init__(
        self,
        *,
        unfinished: Path,
        layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        threads: int,
        cores: Sequence[int],
        slabs: int,
        tokens_a_step: int,
        last_layer: int | None,
    ) -> None:
        # The checksums of the archive format take longer than the write; ours are of the device.
        torch.serialization.set_crc32_options(False)
        self._unfinished = unfinished
        self._last_layer = last_layer
        self._cores = cores if device.type == "cpu" else ()
        self._pool = _SlabPool(
            lambda: Slab(layers, tokens_a_step, hidden_size, dtype, device), slabs
        )
        self._announced: dict[str, Announced] = {}
        self._samples: dict[str, _Sample] = {}
        self._jobs: queue.SimpleQueue[_Sample | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._written: list[Written] = []
        self._last_states: dict[str, Tensor] = {}
        self._failure: str | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"state-writer-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def announce(self, requests: Sequence[Announced]) -> None:
        """Name requests that are to be written; rows of others are passed over."""
        self._announced.update((request.request_id, request) for request in requests)

    def take(self, chunks: Sequence[Chunk], states: Sequence[Tensor]) -> None:
        """Take the rows of one step.

        Args:
            chunks: what was computed, in the order of the rows.
            states: one ``[rows, H]`` tensor a layer, in the order of the layer ids; what follows
                the chunks' rows is padding.

        Raises:
            Refusal: too few rows, or rows that do not follow those before.
        """
        total = sum(len(chunk.token_ids) for chunk in chunks)
        for rows in states:
            if len(rows) < total:
                raise _refusal(f"{total} rows of this step", f"{len(rows)} in a decoder layer")
        if self._failure or not any(chunk.request_id in self._announced for chunk in chunks):
            return
        slab = self._pool.take()
        try:
            slab.fill(states, total)
            start = 0
            for chunk in chunks:
                end = start + len(chunk.token_ids)
                if chunk.request_id in self._announced:
                    self._add(chunk, _Part(slab, start, end))
                start = end
        finally:
            self._pool.release(slab)

    def _add(self, chunk: Chunk, part: _Part) -> None:
        request_id = chunk.request_id
        if chunk.start == 0:  # the first rows, or once more the first, after a preemption
            self._drop(request_id)
            announced = self._announced[request_id]
            self._samples[request_id] = _Sample(announced, chunk.prompt_length)
        sample = self._samples.get(request_id)
        computed = 0 if sample is None else len(sample.token_ids)
        if sample is None or chunk.start != computed:
            raise _refusal(
                f"rows of {request_id} from position {computed} on",
                f"rows from position {chunk.start} on",
            )
        self._pool.hold(part.slab)
        sample.parts.append(part)
        sample.token_ids.extend(chunk.token_ids)
        if len(sample.token_ids) == sample.prompt_length:
            del self._samples[request_id], self._announced[request_id]
            self._pool.writer_works(1)
            self._jobs.put(sample)

    def _drop(self, request_id: str) -> None:
        sample = self._samples.pop(request_id, None)
        for part in sample.parts if sample else ():
            self._pool.release(part.slab)

    def collect(self) -> tuple[list[Written], str | None]:
        """Samples written since the last call, and why writing cannot go on, once it cannot."""
        with self._lock:
            written, self._written = self._written, []
            return written, self._failure

    def last_states(self, request_ids: Sequence[str]) -> Tensor:
        """The last row of the verifier's last layer, ``[n, H]``, of samples that were written."""
        with self._lock:
            return torch.stack([self._last_states.pop(each) for each in request_ids])

    def close(self) -> None:
        """Let the writers finish what they have, and end them."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        if self._cores:
            os.sched_setaffinity(0, self._cores)  # of this thread alone
        while (sample := self._jobs.get()) is not None:
            try:
                if self._failure is None:
                    self._write(sample)
            except Exception as error:  # noqa: BLE001 - told to the parent, which ends the run
                with self._lock:
                    self._failure = f"{type(error).__name__}: {error}"
            finally:
                for part in sample.parts:
                    self._pool.release(part.slab)
                self._pool.writer_works(-1)

    def _write(self, sample: _Sample) -> None:
        for part in sample.parts:
            part.slab.wait()
        layers = range(len(sample.parts[0].slab.states))
        states = [_joined(sample.rows("states", layer)) for layer in layers]
        sums = [torch.cat(sample.rows("row_sums", layer)) for layer in layers]
        norms = [torch.cat(sample.rows("row_norms", layer)) for layer in layers]
        announced = sample.announced
        size = save_sample(
            sample_path(self._unfinished, announced.index),
            sample.token_ids,
            list(announced.loss_mask),
            states,
        )
        written = Written(
            request_id=announced.request_id,
            index=announced.index,
            tokens=len(sample.token_ids),
            bytes=size,
            layer_norms=tuple(float(rows.double().mean()) for rows in norms),
            checksums=tuple(layer_checksum(rows.numpy().tobytes()) for rows in sums),
            fault=_fault(norms),
        )
        with self._lock:
            if self._last_layer is not None and written.fault is None:
                last = states[self._last_layer][-1]
                self._last_states[announced.request_id] = last.clone()
            self._written.append(written)


def _joined(parts: list[Tensor]) -> Tensor:
    """One tensor of all rows, whose storage holds nothing else: all of a storage is written."""
    if len(parts) > 1:
        return torch.cat(parts)
    (rows,) = parts
    return torch.frombuffer(rows.view(torch.uint8).numpy(), dtype=rows.dtype).view(rows.shape)


def _fault(norms: list[Tensor]) -> str | None:
    """What the norms of the rows of each layer, ``[s]``, say against them."""
    for layer, rows in enumerate(norms):
        if not torch.isfinite(rows).all():
            return f"states that are not finite in its layer {layer + 1} of {len(norms)}"
        if not rows.any():
            return f"nothing but zeros in its layer {layer + 1} of {len(norms)}"
    return None


def _refusal(expected: str, found: str) -> Refusal:
    return Refusal(
        "eagle3compat/kimi/state_writer.py in StateWriter.take",
        expected,
        found,
        "Nothing of this request is written. Run eagle3compat bug-report.",
    )
