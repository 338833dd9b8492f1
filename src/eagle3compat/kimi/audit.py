"""Whether the files of an extraction are right, told from the files and the checkpoint alone.

A folder that ``eagle3compat extract`` wrote has manifests, which record each sample's input, the
checksum of every layer and the engine's next token: each file is held against its record. A folder
that speculators wrote has none: see `eagle3compat.kimi.unrecorded` for what can still be told. A
random share of the samples may be extracted anew, alone (`eagle3compat.kimi.anew`).

Memory stays bounded: files are mapped and read in blocks, a few at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.anew import Candidate, check_anew
from eagle3compat.kimi.findings import Finding, Kind, ranges
from eagle3compat.kimi.manifest import Manifest, RunRecord, SampleRecord, read_manifests
from eagle3compat.kimi.output_head import OutputHead, open_output_head
from eagle3compat.kimi.recorded import Recorded
from eagle3compat.kimi.sample_files import files_below, sample_number, scan_all
from eagle3compat.kimi.sample_scan import (
    SampleScan,
    UnreadableSampleError,
)
from eagle3compat.kimi.storage import sample_path
from eagle3compat.kimi.unrecorded import UnrecordedAudit

if TYPE_CHECKING:
    import torch

Watch = Callable[[str, int, int], None]
"""Called with a step's name, what of it is done, and all of it."""

# Last states that are judged together: lm_head is read once for all of them.
NEXT_TOKENS_AT_ONCE = 512


@dataclass(frozen=True)
class AuditSettings:
    """What to audit.

    Args:
        folder: of an extraction, or of files that speculators wrote.
        model: folder of the verifier; None for the one that the manifest names.
        layers: layer ids of files without a manifest; None for speculators' default.
        again_share: share of the samples to extract anew, 0 to 1.
        again_count: how many to extract anew, at least.
        seed: of their choice.
        workers: files that are read at the same time.
    """

    folder: Path
    model: Path | None = None
    layers: tuple[int, ...] | None = None
    again_share: float = 0.0
    again_count: int = 0
    seed: int = 0
    workers: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))

    def again_of(self, samples: int) -> int:
        """How many of so many samples are extracted anew."""
        return min(samples, max(self.again_count, -int(-self.again_share * samples // 1)))


@dataclass
class AuditReport:
    """What an audit saw.

    Args:
        folder: that was audited.
        recorded: whether it has manifests.
        samples: files that were read.
        tokens: of them.
        bytes: of them.
        findings: what is wrong, in the order of the samples.
        checked: what was checked, a sentence each.
        not_checked: what could not be, with the reason, a sentence each.
        notes: what is worth knowing and is no fault.
        again: samples that were extracted anew.
        again_worst: for each layer id, the largest relative error of a row that was found then,
            and what rounding explains.
        seconds: wall clock.
    """

    folder: Path
    recorded: bool
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    again: tuple[int, ...] = ()
    again_worst: dict[int, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """The report as JSON: as the fields, with the kinds' words and ``right``."""
        return {
            "right": self.right,
            "folder": str(self.folder),
            "recorded": self.recorded,
            "samples": self.samples,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "findings": [
                {"sample": each.sample, "file": each.place, "kind": each.kind, "what": each.what}
                for each in self.findings
            ],
            "checked": self.checked,
            "not_checked": self.not_checked,
            "notes": self.notes,
            "again": {
                "samples": list(self.again),
                "layers": {
                    str(layer): {"largest_error": worst, "explained_by_rounding": bound}
                    for layer, (worst, bound) in self.again_worst.items()
                },
            },
            "seconds": round(self.seconds, 3),
        }


def audit(settings: AuditSettings, watch: Watch = lambda step, done, whole: None) -> AuditReport:
    """Check every sample of a folder.

    Args:
        settings: what to check.
        watch: told of the progress.

    Raises:
        InputError: the folder holds no samples, its manifest is none, or a sample is to be
            extracted anew and the checkpoint or the builds that takes are not there.
        Refusal: a sample is to be extracted anew, and these builds do not work together.
    """
    start = time.monotonic()
    if not settings.folder.is_dir():
        raise InputError(f"{settings.folder}: no such folder; give the folder of an extraction")
    manifests = read_manifests(settings.folder)
    report = AuditReport(settings.folder, recorded=bool(manifests))
    if manifests:
        _RecordedAudit(report, settings, manifests, watch).carry_out()
    else:
        UnrecordedAudit(report, settings, watch).carry_out()
    report.findings.sort(key=lambda each: (each.sample is None, each.sample or 0))
    report.seconds = time.monotonic() - start
    return report


class _RecordedAudit:
    """The audit of a folder with manifests."""

    def __init__(
        self,
        report: AuditReport,
        settings: AuditSettings,
        manifests: list[Manifest],
        watch: Watch,
    ) -> None:
        self._settings = settings
        self._manifests = manifests
        self._watch = watch
        self._folder = settings.folder
        self._report = report
        self._recorded = Recorded(
            {index: each for manifest in manifests for index, each in manifest.samples.items()},
            {index: run for manifest in manifests for index, run in _runs_of(manifest)},
        )
        self._done = sorted(
            index for index, record in self._recorded.samples.items() if record.done
        )
        self._head, self._waiting = self._open_head(), _LastStates()

    def carry_out(self) -> None:
        """Check everything, and add it to the report."""
        self._check_shards()
        self._check_runs()
        self._check_set_aside()
        self._check_strays()
        self._check_files()
        self._describe()
        self._extract_anew()

    def _find(self, kind: Kind, place: str, what: str, sample: int | None = None) -> None:
        self._report.findings.append(Finding(kind, place, what, sample))

    @property
    def _model(self) -> Path | None:
        """The verifier's folder, where it is named or still where the last run had it."""
        runs = [run for manifest in self._manifests for run in manifest.runs]
        return self._settings.model or (Path(runs[-1].model) if runs else None)

    def _open_head(self) -> OutputHead | None:
        if not any(self._recorded.samples[index].proof for index in self._done):
            self._report.not_checked.append(
                "next tokens: the manifest has no proof, the last layer was not asked for"
            )
            return None
        if self._model is None or not self._model.is_dir():
            self._report.not_checked.append(
                f"next tokens: the verifier {self._model} is not there (name it with --model)"
            )
            return None
        try:
            return open_output_head(self._model)
        except InputError as error:
            self._report.not_checked.append(f"next tokens: {error}")
            return None

    def _check_shards(self) -> None:
        """Manifests and samples that should be there and are not."""
        count = self._manifests[0].shard[1]
        there = {manifest.shard[0] for manifest in self._manifests}
        for number in sorted(set(range(count)) - there):
            name = f"manifest-{number}-of-{count}.jsonl"
            self._find(Kind.SHARD, name, f"is missing: shard {number} of {count}, counted from 0")
        sizes = {run.samples for manifest in self._manifests for run in manifest.runs}
        if len(sizes) > 1:
            self._find(Kind.SHARD, "manifests", f"of data sets of {sorted(sizes)} samples")
        for manifest in self._manifests:
            if not manifest.runs:
                self._find(Kind.UNFINISHED, manifest.path.name, "has no run")
                continue
            wanted = range(manifest.shard[0], manifest.runs[-1].samples, count)
            left = [index for index in wanted if index not in manifest.samples]
            if left:
                what = f"{len(left)} samples are still to be extracted: {ranges(left)}"
                self._find(Kind.UNFINISHED, manifest.path.name, what)
            strange = [index for index in manifest.samples if index not in wanted]
            if strange:
                what = f"records samples that are not of its shard: {ranges(strange)}"
                self._find(Kind.SHARD, manifest.path.name, what)

    def _check_runs(self) -> None:
        """Whether all runs extracted the same, and whose they were."""
        runs = [run for manifest in self._manifests for run in manifest.runs]
        for name in ("model_digest", "layers", "hidden_size", "dtype"):
            values = {getattr(run, name) for run in runs}
            if len(values) > 1:
                found = " and ".join(str(value) for value in sorted(values))
                self._find(Kind.SHARD, "manifests", f"runs with several {name}: {found}")
        for package in sorted({package for run in runs for package in run.builds}):
            builds = sorted({run.builds.get(package, "none") for run in runs})
            if len(builds) > 1:
                self._report.notes.append(f"several builds of {package}: {'; '.join(builds)}")
        shims = {run.shims for run in runs}
        if len(shims) > 1:
            self._report.notes.append("runs with several sets of shims")

    def _check_set_aside(self) -> None:
        for index, record in sorted(self._recorded.samples.items()):
            if record.reason is None:
                continue
            place = sample_path(Path("set_aside"), index)
            self._find(Kind.SET_ASIDE, str(place), record.reason, index)
            if not (self._folder / place).is_file():
                self._find(Kind.MISSING, str(place), "is missing", index)

    def _check_strays(self) -> None:
        """Files that the trainer would read though no manifest says that they are right."""
        expected = {
            "hidden_states": self._done,
            "set_aside": set(self._recorded.samples) - set(self._done),
            "unfinished": set(),
        }
        for name, indices in expected.items():
            known = {str(sample_path(Path(name), index)) for index in indices}
            for path in files_below(self._folder / name):
                place = str(path.relative_to(self._folder))
                if place in known:
                    continue
                if name == "unfinished":
                    self._find(Kind.UNFINISHED, place, "was being written when its run ended")
                else:
                    self._find(Kind.STRAY, place, self._why_stray(path))
        for path in sorted(self._folder.iterdir()):
            if path.is_file() and path.name.endswith("pt"):
                self._find(Kind.STRAY, path.name, "is no file of an extraction")

    def _why_stray(self, path: Path) -> str:
        index = sample_number(path)
        if index is None or path.parent.parent != self._folder:
            return "is no sample of the manifest"
        whole = self._manifests[0].runs[-1].samples if self._manifests[0].runs else 0
        if index >= whole:
            return f"is numbered outside the data set of {whole} samples"
        record = self._recorded.samples.get(index)
        if record is None:
            return f"no manifest records sample {index}"
        return f"sample {index} was {'set aside' if not record.done else 'not set aside'}"

    def _check_files(self) -> None:
        paths = (sample_path(self._folder / "hidden_states", index) for index in self._done)
        whole = len(self._done)
        scans = scan_all(paths, self._settings.workers)
        for number, (index, scan) in enumerate(zip(self._done, scans, strict=True), start=1):
            self._check_file(index, scan)
            self._watch("reading", number, whole)
        self._check_next_tokens()

    def _check_file(self, index: int, scan: SampleScan | UnreadableSampleError) -> None:
        place = str(sample_path(Path("hidden_states"), index))
        record = self._recorded.samples[index]
        if isinstance(scan, UnreadableSampleError):
            self._find(*_unreadable(self._folder / place, record, scan), sample=index)
            return
        self._report.samples += 1
        self._report.tokens += len(scan.input_ids)
        self._report.bytes += scan.bytes
        found = self._recorded.judge(index, scan, place)
        self._report.findings += found
        if not found and record.proof is not None and scan.last_row is not None:
            self._waiting.add(record, scan.last_row)
            if len(self._waiting) == NEXT_TOKENS_AT_ONCE:
                self._check_next_tokens()

    def _check_next_tokens(self) -> None:
        """The engine's token must be what the file's last state yields, but for rounding."""
        records, states = self._waiting.take()
        if self._head is None or states is None:
            return
        if states.shape[-1] != self._head.hidden_size:
            raise InputError(
                f"--model {self._model}: has hidden size {self._head.hidden_size}, the samples of "
                f"{self._folder} have {states.shape[-1]}; name the verifier that they are of"
            )
        tokens = [record.proof.next_token for record in records if record.proof]
        for record, proof in zip(records, self._head.judge(states, tokens), strict=True):
            if not proof.holds:
                place = str(sample_path(Path("hidden_states"), record.index))
                self._find(
                    Kind.NEXT_TOKEN,
                    place,
                    f"its last state yields token {proof.top}, the engine sampled "
                    f"{proof.next_token}, whose logit is {proof.shortfall:.3g} lower; rounding "
                    f"explains {proof.allowed:.3g}",
                    record.index,
                )

    def _describe(self) -> None:
        """Say in words what was checked."""
        report, runs = self._report, self._manifests[0].runs
        layers = ", ".join(map(str, runs[-1].layers)) if runs else "none"
        report.checked += [
            "manifests of all shards, every sample of the data set, files that no manifest names",
            "input of each sample: digest of token ids and loss mask",
            f"states of each sample: rows, width, dtype, finite, not zero, bits of layers {layers}",
        ]
        if self._head is not None:
            report.checked.append(
                "next token of each sample that is otherwise right, by final norm and "
                f"{self._head.matrix_name} of {self._model}"
            )

    def _extract_anew(self) -> None:
        wanted = self._settings.again_of(len(self._done))
        if not wanted:
            return
        if self._model is None or not self._model.is_dir():
            raise InputError(
                f"--again: the verifier {self._model} is not there; name it with --model"
            )
        candidates = [
            Candidate(index, sample_path(Path("hidden_states"), index)) for index in self._done
        ]
        run = self._recorded.runs[self._done[-1]]
        check_anew(self._report, self._settings, self._model, run.layers, candidates, self._watch)


def _runs_of(manifest: Manifest) -> Iterator[tuple[int, RunRecord]]:
    runs = {run.run: run for run in manifest.runs}
    for index, record in manifest.samples.items():
        if record.run not in runs:
            raise InputError(
                f"{manifest.path}: sample {index} is of run {record.run}, which it does not record"
            )
        yield index, runs[record.run]


class _LastStates:
    """Last states that wait to be judged together."""

    def __init__(self) -> None:
        self._records: list[SampleRecord] = []
        self._rows: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, record: SampleRecord, row: torch.Tensor) -> None:
        self._records.append(record)
        self._rows.append(row)

    def take(self) -> tuple[list[SampleRecord], torch.Tensor | None]:
        """Everything that waits: records, and their rows [n, hidden size]."""
        import torch

        records, rows = self._records, self._rows
        self._records, self._rows = [], []
        return records, torch.stack(rows) if rows else None


def _unreadable(
    path: Path, record: SampleRecord, error: UnreadableSampleError
) -> tuple[Kind, str, str]:
    place = str(path.relative_to(path.parent.parent))
    if not path.is_file():
        return Kind.MISSING, place, str(error)
    size = path.stat().st_size
    if size < record.bytes:
        return Kind.CUT, place, f"cut: {size:,} of {record.bytes:,} bytes ({error})"
    return Kind.UNREADABLE, place, str(error)
