"""The figures of an extraction, from its manifests alone: what `report` shows."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from eagle3compat.kimi.manifest import Manifest, Proof, RunRecord, SampleRecord

# Points of time at which the rate is shown.
RATE_BINS = 60


@dataclass(frozen=True)
class RunFigures:
    """One run of one shard.

    Args:
        record: what it said at its start.
        samples: that it extracted, those of them left out that a later run did again.
        tokens: of them.
        seconds: from its first step until its last byte was safe; None for one that was stopped.
        last: when its last sample was done; its start where it has none.
    """

    record: RunRecord
    samples: int
    tokens: int
    seconds: float | None
    last: float

    @property
    def rate(self) -> float | None:
        """Tokens a second; None for a run that was stopped."""
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Rate:
    """Tokens a second over time.

    Args:
        starts: where each span of time begins, in seconds since the first run's start.
        width: of a span, in seconds.
        rates: tokens a second in it.
    """

    starts: tuple[float, ...]
    width: float
    rates: tuple[float, ...]


@dataclass(frozen=True)
class ProofFigures:
    """The proofs of next tokens.

    Args:
        agreeing: the engine's token has the largest logit.
        explained: it has not, and rounding explains it.
        failing: nothing explains it; those samples are set aside.
        unproved: samples without a proof.
        shares: shortfall by what rounding explains, of those that do not agree and are finite.
        largest: the proof with the largest shortfall; None where all agree.
    """

    agreeing: int
    explained: int
    failing: int
    unproved: int
    shares: tuple[float, ...]
    largest: Proof | None


class ExtractionFigures:
    """Sums up the manifests of an extraction.

    Args:
        manifests: of all shards that are there.
    """

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.manifests = manifests
        self.samples = sorted(
            (record for manifest in manifests for record in manifest.samples.values()),
            key=lambda record: record.time,
        )

    @cached_property
    def done(self) -> list[SampleRecord]:
        """Samples that can be trained on, as they were done."""
        return [record for record in self.samples if record.done]

    @cached_property
    def set_aside(self) -> list[SampleRecord]:
        """Samples whose proof failed, by number."""
        return sorted(
            (record for record in self.samples if not record.done), key=lambda each: each.index
        )

    @cached_property
    def runs(self) -> list[RunFigures]:
        """All runs of all shards, by their start."""
        figures = (run for manifest in self.manifests for run in _figures_of_runs(manifest))
        return sorted(figures, key=lambda each: each.record.started)

    @property
    def whole(self) -> int:
        """Samples of the whole data set."""
        return max((run.record.samples for run in self.runs), default=0)

    @property
    def tokens(self) -> int:
        """Tokens that can be trained on."""
        return sum(record.tokens for record in self.done)

    @property
    def bytes(self) -> int:
        """Size of the files that can be trained on."""
        return sum(record.bytes for record in self.done)

    @property
    def seconds(self) -> float:
        """Of all runs together; of one that was stopped, until its last sample was done."""
        return sum(
            run.last - run.record.started if run.seconds is None else run.seconds
            for run in self.runs
        )

    @property
    def start(self) -> float:
        """When the first run began, in seconds since 1970."""
        return min((run.record.started for run in self.runs), default=0.0)

    @property
    def missing_shards(self) -> list[int]:
        """Shards, counted from 0, of which no manifest is there."""
        count = self.manifests[0].shard[1] if self.manifests else 0
        there = {manifest.shard[0] for manifest in self.manifests}
        return sorted(set(range(count)) - there)

    def by_shard(self) -> list[tuple[str, int, int, int]]:
        """Of each shard: name, samples done, set aside, and in all."""
        rows = []
        for manifest in self.manifests:
            number, count = manifest.shard
            whole = len(range(number, manifest.runs[-1].samples, count)) if manifest.runs else 0
            name = f"{number} of {count}"
            rows.append((name, len(manifest.done), len(manifest.set_aside), whole))
        return rows

    def rate(self) -> Rate:
        """Tokens a second over time, all shards together."""
        end = max((run.last for run in self.runs), default=self.start)
        width = max((end - self.start) / RATE_BINS, 1e-3)
        tokens = [0] * RATE_BINS
        for record in self.done:
            place = int((record.time - self.start) / width)
            tokens[min(max(place, 0), RATE_BINS - 1)] += record.tokens
        starts = tuple(number * width for number in range(RATE_BINS))
        return Rate(starts, width, tuple(each / width for each in tokens))

    def progress(self) -> tuple[list[float], list[int]]:
        """Seconds since the start, and the tokens that were done by then."""
        times, tokens, total = [0.0], [0], 0
        for record in self.done:
            total += record.tokens
            times.append(record.time - self.start)
            tokens.append(total)
        return times, tokens

    def norms(self) -> dict[int, list[float]]:
        """For each layer id the mean norm of a row in each sample that is done."""
        found: dict[int, list[float]] = defaultdict(list)
        for manifest in self.manifests:
            runs = {run.run: run for run in manifest.runs}
            for record in manifest.done.values():
                for layer, norm in zip(runs[record.run].layers, record.layer_norms, strict=True):
                    found[layer].append(norm)
        return dict(found)

    def reasons(self) -> list[tuple[str, int]]:
        """Why samples were set aside, and how many for each; figures in a reason left out."""
        counts = Counter(_without_figures(record.reason or "") for record in self.set_aside)
        return counts.most_common()

    def proofs(self) -> ProofFigures:
        """The proofs of next tokens."""
        proofs = [record.proof for record in self.samples if record.proof is not None]
        apart = [proof for proof in proofs if proof.next_token != proof.top]
        explained = sum(proof.holds for proof in apart)
        finite = [
            proof for proof in apart if math.isfinite(proof.shortfall) and proof.allowed < math.inf
        ]
        return ProofFigures(
            agreeing=len(proofs) - len(apart),
            explained=explained,
            failing=len(apart) - explained,
            unproved=len(self.samples) - len(proofs),
            shares=tuple(proof.shortfall / proof.allowed for proof in finite if proof.allowed > 0),
            largest=max(finite, key=lambda proof: proof.shortfall, default=None),
        )


def _figures_of_runs(manifest: Manifest) -> Iterator[RunFigures]:
    by_run: dict[int, list[SampleRecord]] = defaultdict(list)
    for record in manifest.samples.values():
        by_run[record.run].append(record)
    seconds = {end.run: end.seconds for end in manifest.ends}
    for run in manifest.runs:
        records = by_run[run.run]
        done = [record for record in records if record.done]
        yield RunFigures(
            record=run,
            samples=len(done),
            tokens=sum(record.tokens for record in done),
            seconds=seconds.get(run.run),
            last=max((record.time for record in records), default=run.started),
        )


def _without_figures(reason: str) -> str:
    words = ("…" if any(letter.isdigit() for letter in word) else word for word in reason.split())
    return " ".join(words)
