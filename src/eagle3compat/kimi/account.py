"""Keeps account of an extraction, in a thread beside the engine: names, manifest, progress."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from eagle3compat.errors import InterruptedRun, Refusal
from eagle3compat.kimi.exchange import Written
from eagle3compat.kimi.manifest import ManifestWriter, Proof, SampleRecord
from eagle3compat.kimi.storage import ExtractionFolder, sample_path, sync_folder

# A run whose first samples all fail goes on with nothing worth having.
HOPELESS = 8


@dataclass(frozen=True)
class Settled:
    """A sample that was written, with what is needed to account for it.

    Args:
        written: what the worker says of its file.
        proof: of its next token; None where it could not be proved, or has a fault.
        line: of the data file.
        input_digest: of its input.
    """

    written: Written
    proof: Proof | None
    line: int
    input_digest: str

    @property
    def reason(self) -> str | None:
        """Why it is to be set aside; None where it is right."""
        if self.written.fault is not None:
            return self.written.fault
        if self.proof is not None and not self.proof.holds:
            return (
                f"the stored last state gives the next token {self.proof.top}, the engine sampled "
                f"{self.proof.next_token}; its logit is {self.proof.shortfall:.3g} lower, and "
                f"rounding explains {self.proof.allowed:.3g}"
            )
        return None


class Account:
    """Gives proved samples their place, and says so in the manifest.

    Args:
        folder: claimed.
        manifest: of the folder's shard.
        run: number of this run in it.
        advance: called with the record of each sample that is accounted for, from another thread.
    """

    def __init__(
        self,
        folder: ExtractionFolder,
        manifest: ManifestWriter,
        run: int,
        advance: Callable[[SampleRecord], None],
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._run = run
        self._advance = advance
        self._queue: queue.SimpleQueue[Settled | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.done = 0
        self.tokens = 0
        self.bytes = 0
        self.set_aside: list[SampleRecord] = []
        self._thread = threading.Thread(target=self._work, name="account", daemon=True)
        self._thread.start()

    def settle(self, sample: Settled) -> None:
        """Account for a sample; returns at once.

        Raises:
            InterruptedRun: an earlier sample could not be put in its place.
            Refusal: none of the first samples of the run is right.
        """
        self.check()
        self._queue.put(sample)

    def check(self) -> None:
        """Raise what `settle` raises."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Return when all samples are accounted for; raises what `settle` raises."""
        self.stop()
        self.check()

    def stop(self) -> None:
        """Return when all samples that were settled are accounted for."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while batch := self._batch():
                self._settle(batch)
        except Refusal as error:
            self._failure = error
        except OSError as error:
            self._failure = InterruptedRun(
                f"{self._folder.path}: a sample cannot be put in its place ({error}). What is done "
                "stays done: mend it, then run this again."
            )
            self._failure.__cause__ = error

    def _batch(self) -> list[Settled]:
        """All that is there to settle, but at least one; nothing at the end."""
        batch = []
        sample = self._queue.get()
        while sample is not None:
            batch.append(sample)
            if self._queue.empty():
                return batch
            sample = self._queue.get()
        if batch:
            self._queue.put(None)
        return batch

    def _settle(self, batch: list[Settled]) -> None:
        records = [self._record(sample) for sample in batch]
        for record in records:
            right, wrong = (
                sample_path(folder, record.index)
                for folder in (self._folder.samples, self._folder.set_aside)
            )
            place, other = (right, wrong) if record.done else (wrong, right)
            sample_path(self._folder.unfinished, record.index).replace(place)
            other.unlink(missing_ok=True)
        for folder in (self._folder.samples, self._folder.set_aside):
            sync_folder(folder)
        self._manifest.append(records)
        for record in records:
            self._count(record)

    def _record(self, sample: Settled) -> SampleRecord:
        written = sample.written
        return SampleRecord(
            index=written.index,
            line=sample.line,
            input_digest=sample.input_digest,
            tokens=written.tokens,
            bytes=written.bytes,
            layer_norms=written.layer_norms,
            checksums=written.checksums,
            proof=sample.proof,
            run=self._run,
            time=round(time.time(), 3),
            reason=sample.reason,
        )

    def _count(self, record: SampleRecord) -> None:
        if record.done:
            self.done += 1
            self.tokens += record.tokens
            self.bytes += record.bytes
        else:
            self.set_aside.append(record)
        self._advance(record)
        if not self.done and len(self.set_aside) >= HOPELESS:
            raise Refusal(
                str(self._folder.samples),
                "samples whose proof holds",
                f"none among the first {HOPELESS}; the first: {self.set_aside[0].reason}",
                f"Look at the checkpoint's weights; the samples are in {self._folder.set_aside}.",
            )
