"""The audit of sample files that speculators wrote, of which no manifest says what they held.

Each file is held against itself, against the others and against the checkpoint
(`eagle3compat.kimi.crosschecks`); and torch wrote a CRC-32 beside each tensor, which a bit that
changed on the disk breaks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.anew import Candidate, Engine, check_anew
from eagle3compat.kimi.crosschecks import Beginnings, Fault, Norms, TextFit, Twins
from eagle3compat.kimi.findings import Finding, Kind, ranges, rows_in_words
from eagle3compat.kimi.output_head import open_output_head
from eagle3compat.kimi.sample_files import files_below, sample_number, scan_all
from eagle3compat.kimi.sample_scan import (
    LayerScan,
    SampleScan,
    UnreadableSampleError,
    load_sample,
)
from eagle3compat.kimi.verifier import Verifier, read_verifier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from eagle3compat.kimi.audit import AuditReport, AuditSettings, Watch

# For what rounding explains where layer ids are not known: those of the last of 61 layers.
DEEPEST_LAYER = 60
# Files that are kept open while samples are compared.
OPEN_FILES = 16


class UnrecordedAudit:
    """The audit of a folder of ``data_{index}.pt`` files without a manifest.

    Args:
        report: to fill.
        settings: what to check.
        watch: told of the progress.

    Raises:
        InputError: the folder holds no samples, or the checkpoint that is named cannot be read.
    """

    def __init__(self, report: AuditReport, settings: AuditSettings, watch: Watch) -> None:
        self._report = report
        self._settings = settings
        self._watch = watch
        self._verifier = None if settings.model is None else read_verifier(settings.model)
        self._paths, self._strays = _sample_files(settings.folder)
        self._readable: dict[int, tuple[int, int, str]] = {}
        self._layers = self._settle_layers()
        self._twins, self._norms = Twins(), Norms()
        self._beginnings = Beginnings(self._layer_id)
        self._text = self._open_text()
        self._load = lru_cache(maxsize=OPEN_FILES)(self._load_file)

    def carry_out(self) -> None:
        """Check everything, and add it to the report."""
        self._check_names()
        self._check_files()
        self._check_shapes()
        self._check_together()
        self._describe()
        self._extract_anew()

    def _find(self, index: int, kind: Kind, what: str) -> None:
        self._report.findings.append(Finding(kind, self._place(index), what, index))

    def _take(self, faults: Iterable[Fault], untold: str | None = None) -> None:
        for index, kind, what in faults:
            self._find(index, kind, what)
        if untold is not None:
            self._report.not_checked.append(untold)

    def _place(self, index: int) -> str:
        return str(self._paths[index].relative_to(self._settings.folder))

    def _load_file(self, index: int) -> dict[str, Any]:
        return load_sample(self._paths[index])

    def _settle_layers(self) -> tuple[int, ...] | None:
        """The layer ids, as far as the user's options tell them."""
        if self._verifier is None or self._settings.layers is not None:
            return self._settings.layers
        return self._verifier.default_layers()

    def _layer_id(self, place: int) -> int:
        layers = self._layers
        return layers[place] if layers and place < len(layers) else DEEPEST_LAYER

    def _open_text(self) -> TextFit | None:
        if self._settings.model is None:
            self._report.not_checked.append("text and vocabulary: name the verifier with --model")
            return None
        try:
            head = open_output_head(self._settings.model)
            return TextFit(head, self._settings.seed, self._settings.workers)
        except InputError as error:
            self._report.not_checked.append(f"text: {error}")
            return None

    def _check_names(self) -> None:
        for path in self._strays:
            place = str(path.relative_to(self._settings.folder))
            what = "is no data_{index}.pt, and the trainer reads it"
            self._report.findings.append(Finding(Kind.STRAY, place, what))
        missing = sorted(set(range(max(self._paths) + 1)) - set(self._paths))
        if missing:
            what = f"{len(missing)} samples are missing: {ranges(missing)}"
            self._report.findings.append(Finding(Kind.MISSING, "data_{index}.pt", what))

    def _check_files(self) -> None:
        indices = sorted(self._paths)
        scans = scan_all(
            (self._paths[index] for index in indices), self._settings.workers, archives=True
        )
        for number, (index, scan) in enumerate(zip(indices, scans, strict=True), start=1):
            if isinstance(scan, UnreadableSampleError):
                self._find(index, Kind.UNREADABLE, str(scan))
            else:
                self._check_file(index, scan)
            self._watch("reading", number, len(indices))

    def _check_file(self, index: int, scan: SampleScan) -> None:
        self._report.samples += 1
        self._report.tokens += len(scan.input_ids)
        self._report.bytes += scan.bytes
        faults = [*_input_faults(scan, self._verifier), *_state_faults(scan)]
        for kind, what in faults:
            self._find(index, kind, what)
        if not scan.layers or any(kind in (Kind.CUT, Kind.ROWS, Kind.SHAPE) for kind, _ in faults):
            return
        self._readable[index] = (len(scan.layers), scan.layers[-1].shape[1], scan.layers[-1].dtype)
        if faults:
            return
        self._take(self._twins.add(index, scan))
        self._norms.add(index, scan)
        if self._text is not None:
            self._text.add(index, scan)

    def _check_shapes(self) -> None:
        """All samples are alike in layers, width and dtype, and as the verifier has it."""
        shapes = Counter(self._readable.values())
        if not shapes:
            return
        usual = shapes.most_common(1)[0][0]
        for index, shape in self._readable.items():
            if shape != usual:
                found, expected = (
                    f"{layers} layers of {width} in {dtype}"
                    for layers, width, dtype in (shape, usual)
                )
                self._find(index, Kind.SHAPE, f"{found}; most samples have {expected}")
        verifier, (layers, width, _) = self._verifier, usual
        if verifier is not None and width != verifier.hidden_size:
            raise InputError(
                f"--model {verifier.path}: has hidden size {verifier.hidden_size}, the samples "
                f"have {width}; name the verifier that they are of"
            )
        if self._layers is not None and layers != len(self._layers):
            if self._settings.layers is not None:
                raise InputError(
                    f"--layers: names {len(self._layers)} layers, the samples have {layers}"
                )
            self._layers = None

    def _check_together(self) -> None:
        """Hold the samples against each other in which nothing is wrong so far."""
        alike = [index for index in sorted(self._readable) if index not in self._faulty()]
        for number, index in enumerate(alike, start=1):
            self._beginnings.add(index, self._load(index), self._load)
            self._watch("comparing beginnings", number, len(alike))
        faults, untold = self._norms.faults(alike)
        self._take(faults, untold)
        if self._text is not None:
            faults, untold = self._text.faults(
                alike,
                self._load,
                lambda done, whole: self._watch("comparing with the text", done, whole),
            )
            self._take(faults, untold)
        self._take(self._beginnings.faults(self._faulty()))

    def _faulty(self) -> set[int]:
        return {each.sample for each in self._report.findings if each.sample is not None}

    def _describe(self) -> None:
        report, compared = self._report, self._beginnings.compared
        report.checked += [
            "names of the files, that torch loads them, CRC-32 of what they hold",
            "rows = tokens = loss mask; width, dtype and layers as in the others; finite, not zero",
            "no layer of a sample is another's, or another layer",
            f"equal beginnings have equal rows: {compared} samples share one with another",
        ]
        if self._text is not None and not any(
            each.startswith("text: the verifier") for each in report.not_checked
        ):
            report.checked.append("last states and next tokens of the text belong together")
        report.not_checked.append(
            "what was extracted: no manifest records it; a sample whose beginning no other has is "
            "held against its own text at most (--again extracts samples anew)"
        )

    def _extract_anew(self) -> None:
        if not self._settings.again_of(len(self._readable)):
            return
        if self._settings.model is None:
            raise InputError("--again: name the verifier with --model")
        if self._layers is None:
            raise InputError("--again: name the layer ids of the files with --layers")
        candidates = [Candidate(each, Path(self._place(each))) for each in sorted(self._readable)]
        parallel = self._settings.tensor_parallel_size or 1
        engine = Engine(self._settings.model, self._layers, parallel)
        check_anew(self._report, self._settings, engine, candidates, self._watch)


def _sample_files(folder: Path) -> tuple[dict[int, Path], list[Path]]:
    """The sample files by their numbers, and others that the trainer takes for samples."""
    samples: dict[int, Path] = {}
    strays = []
    for path in files_below(folder):
        index = sample_number(path)
        if index is not None and index not in samples:
            samples[index] = path
        elif path.name.endswith("pt"):
            strays.append(path)
    if not samples:
        raise InputError(
            f"{folder}: holds no manifest and no data_{{index}}.pt; give the folder that "
            "eagle3compat extract or speculators wrote to"
        )
    return samples, strays


def _input_faults(scan: SampleScan, verifier: Verifier | None) -> Iterator[tuple[Kind, str]]:
    tokens = len(scan.input_ids)
    if not tokens:
        yield Kind.INPUT, "has no tokens"
    if scan.loss_mask is None:
        yield Kind.INPUT, "holds no loss mask, which the trainer needs"
    elif len(scan.loss_mask) != tokens:
        yield Kind.INPUT, f"{len(scan.loss_mask)} entries of the loss mask for {tokens} tokens"
    elif not set(scan.loss_mask) <= {0, 1}:
        yield Kind.INPUT, "its loss mask holds other numbers than 0 and 1"
    if verifier is not None:
        outside = [each for each in scan.input_ids if not 0 <= each < verifier.vocab_size]
        if outside:
            yield Kind.INPUT, f"token id {outside[0]} is outside the verifier's vocabulary"


def _state_faults(scan: SampleScan) -> Iterator[tuple[Kind, str]]:
    if not scan.layers:
        yield Kind.LAYERS, "holds no layers"
    if scan.broken_record is not None:
        yield Kind.BITS, f"CRC-32 of {scan.broken_record} does not hold: bits changed"
    places: dict[tuple[Kind, str], list[int]] = defaultdict(list)
    for place, layer in enumerate(scan.layers):
        fault = _layer_fault(layer, len(scan.input_ids))
        if fault is not None:
            places[fault].append(place)
    for (kind, what), where in places.items():
        if len(where) > 1 and len(where) == len(scan.layers):
            yield kind, f"every layer: {what}"
        else:
            yield kind, f"layer{'s' * (len(where) > 1)} at place {ranges(where)}: {what}"


def _layer_fault(layer: LayerScan, tokens: int) -> tuple[Kind, str] | None:
    if len(layer.shape) != 2:
        return Kind.SHAPE, f"shape {list(layer.shape)}, expected rows of states"
    if layer.rows < tokens:
        return Kind.CUT, f"cut: {layer.rows} of {tokens} rows"
    if layer.rows > tokens:
        return Kind.ROWS, f"{layer.rows} rows for {tokens} tokens"
    if layer.infinite_rows:
        return Kind.NOT_FINITE, f"NaN or infinity in {rows_in_words(layer.infinite_rows)}"
    if layer.zeroed:
        return Kind.ZEROED, "zeros alone"
    # One zero row may be right: a padding token's embedding is, and stays so in the first place.
    if len(layer.zero_rows) > 1:
        return Kind.ZEROED, f"{rows_in_words(layer.zero_rows)} of {layer.rows}: zeros alone"
    return None
