"""The audit of a folder that has manifests: shards, runs, every sample's file, and strays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3compat.errors import InputError
from eagle3compat.kimi.anew import Candidate, Engine, check_anew
from eagle3compat.kimi.crosschecks import Twins
from eagle3compat.kimi.dataset import combined_digest
from eagle3compat.kimi.extraction import model_digest
from eagle3compat.kimi.findings import Finding, Kind, ranges
from eagle3compat.kimi.manifest import Manifest, RunRecord, SampleRecord
from eagle3compat.kimi.output_head import OutputHead, open_output_head
from eagle3compat.kimi.recorded import Recorded
from eagle3compat.kimi.sample_files import files_below, sample_number, scan_all
from eagle3compat.kimi.sample_scan import SampleScan, UnreadableSampleError
from eagle3compat.kimi.storage import ExtractionFolder, Shard, sample_path

if TYPE_CHECKING:
    import torch

    from eagle3compat.kimi.audit import AuditReport, AuditSettings, Watch

# Last states that are judged together: lm_head is read once for all of them.
NEXT_TOKENS_AT_ONCE = 512
# What all runs of one extraction have in common.
_ALIKE = ("model_digest", "layers", "hidden_size", "dtype", "samples", "data_digest")


class RecordedAudit:
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
        self._samples = Path(ExtractionFolder(self._folder).samples.name)
        self._set_aside = Path(ExtractionFolder(self._folder).set_aside.name)
        self._report = report
        self._recorded = Recorded(
            {index: each for manifest in manifests for index, each in manifest.samples.items()},
            {index: run for manifest in manifests for index, run in _runs_of(manifest)},
        )
        self._done = sorted(
            index for index, record in self._recorded.samples.items() if record.done
        )
        self._twins = Twins()
        self._head, self._waiting = self._open_head(), _LastStates()

    def carry_out(self) -> None:
        """Check everything, and add it to the report."""
        self._check_shards()
        self._check_runs()
        self._check_data()
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
        for manifest in self._manifests:
            if not manifest.runs:
                self._find(Kind.UNFINISHED, manifest.path.name, "has no run")
                continue
            wanted = Shard(*manifest.shard).indices(manifest.runs[-1].samples)
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
        for name in _ALIKE:
            values = {getattr(run, name) for run in runs}
            if len(values) > 1:
                found = " and ".join(str(value) for value in sorted(values))
                self._find(Kind.SHARD, "manifests", f"runs with several {name}: {found}")
        model = self._model
        if runs and model is not None and model.is_dir():
            self._check_checkpoint(model, runs[-1])
        for package in sorted({package for run in runs for package in run.builds}):
            builds = sorted({run.builds.get(package, "none") for run in runs})
            if len(builds) > 1:
                self._report.notes.append(f"several builds of {package}: {'; '.join(builds)}")
        shims = {run.shims for run in runs}
        if len(shims) > 1:
            self._report.notes.append("runs with several sets of shims")

    def _check_checkpoint(self, model: Path, run: RunRecord) -> None:
        if model_digest(model) != run.model_digest:
            what = "its config.json or its weight files are not those that were extracted from"
            self._find(Kind.CHECKPOINT, str(model), what)

    def _check_data(self) -> None:
        """Whether the samples that are recorded are together those of the data set."""
        runs = [run for manifest in self._manifests for run in manifest.runs]
        if not runs or self._recorded.samples.keys() != set(range(runs[-1].samples)):
            return  # found by shards
        digests = (record.input_digest for record in self._recorded.samples.values())
        if combined_digest(digests) != runs[-1].data_digest:
            what = "the samples' inputs are not together those of the data set"
            self._find(Kind.SHARD, "manifests", what)

    def _check_set_aside(self) -> None:
        for index, record in sorted(self._recorded.samples.items()):
            if record.reason is None:
                continue
            place = sample_path(self._set_aside, index)
            self._find(Kind.SET_ASIDE, str(place), record.reason, index)
            if not (self._folder / place).is_file():
                self._find(Kind.MISSING, str(place), "is missing", index)

    def _check_strays(self) -> None:
        """Files that the trainer would read though no manifest says that they are right."""
        aside = self._recorded.samples.keys() - set(self._done)
        for folder, indices in ((self._samples, self._done), (self._set_aside, aside)):
            known = {sample_path(folder, index) for index in indices}
            for path in files_below(self._folder / folder):
                place = path.relative_to(self._folder)
                if place not in known:
                    self._find(Kind.STRAY, str(place), self._why_stray(path))
        for path in files_below(ExtractionFolder(self._folder).unfinished.parent):
            place = path.relative_to(self._folder)
            self._find(Kind.UNFINISHED, str(place), "was being written when its run ended")
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
        paths = (sample_path(self._folder / self._samples, index) for index in self._done)
        whole = len(self._done)
        scans = scan_all(paths, self._settings.workers)
        for number, (index, scan) in enumerate(zip(self._done, scans, strict=True), start=1):
            self._check_file(index, scan)
            self._watch("reading", number, whole)
        self._check_next_tokens()

    def _check_file(self, index: int, scan: SampleScan | UnreadableSampleError) -> None:
        place = str(sample_path(self._samples, index))
        record = self._recorded.samples[index]
        if isinstance(scan, UnreadableSampleError):
            self._find(*_unreadable(self._folder / place, record, scan), sample=index)
            return
        self._report.samples += 1
        self._report.tokens += len(scan.input_ids)
        self._report.bytes += scan.bytes
        found = self._recorded.judge(index, scan, place)
        for sample, kind, what in () if found else self._twins.add(index, scan):
            found.append(Finding(kind, place, what, sample))
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
                place = str(sample_path(self._samples, record.index))
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
            "no layer of a sample is another's, or another layer",
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
        candidates = [Candidate(index, sample_path(self._samples, index)) for index in self._done]
        run = self._recorded.runs[self._done[-1]]
        parallel = self._settings.tensor_parallel_size
        engine = Engine(
            self._model, run.layers, parallel or run.settings.get("tensor_parallel_size", 1)
        )
        check_anew(self._report, self._settings, engine, candidates, self._watch)


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
