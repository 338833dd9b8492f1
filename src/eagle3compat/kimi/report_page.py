"""One HTML page on an extraction, the training of its draft, and how the draft serves.

The page holds everything it shows: it needs no network and no other file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import eagle3compat
from eagle3compat.errors import InputError
from eagle3compat.kimi.extraction_figures import ExtractionFigures
from eagle3compat.kimi.findings import ranges
from eagle3compat.kimi.manifest import RunRecord, read_manifests
from eagle3compat.kimi.metrics import History, read_history
from eagle3compat.kimi.storage import write_whole

TEMPLATE = "report_page.html.jinja"
PAGE = "report.html"
METRICS = "metrics.jsonl"
MOST_ROWS = 100


@dataclass(frozen=True)
class ReportSettings:
    """What to report on.

    Args:
        folder: of an extraction.
        out: the page to write; None for ``report.html`` in the folder.
        draft: folder of a draft that was trained, with ``metrics.jsonl``; None for none.
        acceptance: JSON file of measured acceptance lengths; None for none.
    """

    folder: Path
    out: Path | None = None
    draft: Path | None = None
    acceptance: Path | None = None


@dataclass(frozen=True)
class Plot:
    """An image with what it shows, in words."""

    caption: str
    uri: str


@dataclass(frozen=True)
class Table:
    """Rows under heads; ``numbers`` are the columns that are set right."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: tuple[int, ...] = ()

    def is_number(self, column: int) -> bool:
        """Whether a column holds numbers."""
        return column in self.numbers


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    lines: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def write_report(settings: ReportSettings) -> Path:
    """Write the page, whole or not at all.

    Returns:
        The page.

    Raises:
        InputError: the folder is no extraction, a file that was named cannot be read, the page
            cannot be written, or matplotlib is not installed.
    """
    if not settings.folder.is_dir():
        raise InputError(f"{settings.folder}: no such folder; give the folder of an extraction")
    missing = [package for package in ("matplotlib", "jinja2") if find_spec(package) is None]
    if missing:
        raise InputError(
            f"report: needs {' and '.join(missing)}; install them: pip install eagle3compat[plots]"
        )
    manifests = read_manifests(settings.folder)
    if not any(manifest.runs for manifest in manifests):
        raise InputError(
            f"{settings.folder}: holds no manifest of an extraction; give the folder that "
            "eagle3compat extract wrote to"
        )
    history = None if settings.draft is None else _read_draft(settings.draft)
    lengths = None if settings.acceptance is None else read_acceptance(settings.acceptance)
    page = _page(settings.folder, ExtractionFigures(manifests), history, lengths)
    out = settings.out or settings.folder / PAGE
    try:
        write_whole(out, lambda stream: stream.write(page.encode("utf-8")))
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written ({error})") from error
    return out


def read_acceptance(path: Path) -> dict[str, float]:
    """Acceptance lengths by what was served.

    Raises:
        InputError: it cannot be read, or is no such file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        lengths = dict(_lengths(content, "draft"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"--acceptance {path}: no acceptance lengths ({error!r})") from error
    if not lengths:
        raise InputError(f"--acceptance {path}: holds no acceptance lengths")
    return lengths


def _lengths(content: Any, name: str) -> Iterator[tuple[str, float]]:
    """Every ``acceptance_length`` in a JSON document, with the name of what was served.

    Args:
        content: the document or a part of it.
        name: by which it is known: the key that leads to it.
    """
    if isinstance(content, list):
        for number, part in enumerate(content, start=1):
            yield from _lengths(part, f"{name} {number}")
    elif isinstance(content, dict):
        if "acceptance_length" in content:
            known = content.get("name", content.get("draft", name))
            yield str(known), float(content["acceptance_length"])
        for key, part in content.items():
            yield from _lengths(part, key)


def _read_draft(draft: Path) -> History:
    path = draft / METRICS
    if not path.is_file():
        raise InputError(f"--draft {draft}: holds no {METRICS}; give the folder of a training")
    history = read_history(path)
    if not history.steps and not history.validations:
        raise InputError(f"--draft {draft}: {METRICS} holds no figures yet")
    return history


def _page(
    folder: Path,
    figures: ExtractionFigures,
    history: History | None,
    lengths: Mapping[str, float] | None,
) -> str:
    from jinja2 import Environment, StrictUndefined

    source = resources.files("eagle3compat.kimi").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    sections = [
        _progress(figures),
        _norms(figures),
        _set_aside(figures),
        _next_tokens(figures),
        *([] if history is None else [_training(history)]),
        *([] if lengths is None else [_acceptance(lengths)]),
        _runs(figures),
    ]
    return environment.from_string(source).render(
        title="EAGLE-3: extraction" + ("" if history is None else " and training"),
        folder=str(folder.resolve()),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        version=eagle3compat.__version__,
        tiles=_tiles(figures, history, lengths),
        warnings=_warnings(figures),
        sections=sections,
    )


def _tiles(
    figures: ExtractionFigures, history: History | None, lengths: Mapping[str, float] | None
) -> list[tuple[str, str]]:
    tiles = [
        (f"of {figures.whole:,} samples done", f"{len(figures.done):,}"),
        ("tokens", f"{figures.tokens:,}"),
        ("of files", _size(figures.bytes)),
        ("samples set aside", f"{len(figures.set_aside):,}"),
        ("of extraction", _duration(figures.seconds)),
    ]
    if figures.seconds:
        tiles.append(("tokens a second", f"{figures.tokens / figures.seconds:,.0f}"))
    if history is not None:
        last = (history.validations or history.steps)[-1]
        tiles.append(("loss of the draft", f"{last.loss:.3g}"))
    if lengths is not None:
        tiles.append(("largest acceptance length", f"{max(lengths.values()):.2f}"))
    return tiles


def _warnings(figures: ExtractionFigures) -> list[str]:
    warnings = []
    missing = figures.missing_shards
    if missing:
        warnings.append(f"No manifest of shard {ranges(missing)}, counted from 0, is there.")
    left = figures.whole - len(figures.samples)
    if left:
        warnings.append(f"{left:,} samples are still to be extracted.")
    if figures.set_aside:
        warnings.append(f"{len(figures.set_aside):,} samples were set aside.")
    return warnings


def _progress(figures: ExtractionFigures) -> Section:
    from eagle3compat.kimi import plots

    section = Section("Tokens and rate")
    if figures.done:
        section.plots.append(Plot("Tokens done over time", plots.progress(figures)))
        section.plots.append(Plot("Tokens a second over time", plots.rate(figures)))
        tokens = [record.tokens for record in figures.done]
        section.plots.append(Plot("Samples by their tokens", plots.lengths(tokens)))
    rows = [
        (name, f"{done:,}", f"{aside:,}", f"{whole:,}")
        for name, done, aside, whole in figures.by_shard()
    ]
    heads = ("shard", "done", "set aside", "samples")
    section.tables.append(Table(heads, rows, numbers=(1, 2, 3)))
    return section


def _norms(figures: ExtractionFigures) -> Section:
    from eagle3compat.kimi import plots

    norms = figures.norms()
    if not norms:
        return Section("Norms", ["No sample is done."])
    rows = []
    for layer, values in norms.items():
        ordered = sorted(values)
        middle = ordered[len(ordered) // 2]
        rows.append((str(layer), *(f"{each:.4g}" for each in (ordered[0], middle, ordered[-1]))))
    section = Section("Norms", ["Mean norm of a row, over samples: range, quartiles, median."])
    section.plots.append(Plot("Distribution of norms over samples, by layer", plots.norms(norms)))
    section.tables.append(Table(("layer", "least", "median", "most"), rows, numbers=(1, 2, 3)))
    return section


def _set_aside(figures: ExtractionFigures) -> Section:
    aside = figures.set_aside
    if not aside:
        return Section("Set aside", ["No sample was set aside."])
    reasons = [(reason, f"{count:,}") for reason, count in figures.reasons()]
    samples = [
        (str(record.index), str(record.line), f"{record.tokens:,}", record.reason or "")
        for record in aside[:MOST_ROWS]
    ]
    section = Section("Set aside")
    section.tables.append(Table(("reason", "samples"), reasons, numbers=(1,)))
    heads = ("sample", "line", "tokens", "reason")
    section.tables.append(Table(heads, samples, numbers=(0, 1, 2)))
    if len(aside) > MOST_ROWS:
        section.lines.append(f"The first {MOST_ROWS} of {len(aside):,} samples are shown.")
    return section


def _next_tokens(figures: ExtractionFigures) -> Section:
    from eagle3compat.kimi import plots

    proofs = figures.proofs()
    section = Section(
        "Next tokens",
        ["The engine's greedy token beside what the stored last state yields."],
    )
    rows = [
        ("the same", f"{proofs.agreeing:,}"),
        ("another, as rounding explains", f"{proofs.explained:,}"),
        ("another, and nothing explains it (set aside)", f"{proofs.failing:,}"),
        ("without a proof", f"{proofs.unproved:,}"),
    ]
    section.tables.append(Table(("next token", "samples"), rows, numbers=(1,)))
    if proofs.largest is not None:
        section.lines.append(
            f"Largest shortfall of a logit: {proofs.largest.shortfall:.3g}; rounding explains "
            f"{proofs.largest.allowed:.3g} there."
        )
    if proofs.shares:
        section.plots.append(Plot("Shortfalls where tokens differ", plots.shortfalls(proofs)))
    return section


def _training(history: History) -> Section:
    from eagle3compat.kimi import plots

    state = "came to its end" if history.ended else "has not come to its end"
    section = Section(
        "Training",
        [
            f"{len(history.steps):,} steps in {history.runs} run"
            f"{'' if history.runs == 1 else 's'} and {_duration(history.seconds)}; it {state}."
        ],
    )
    section.plots.append(Plot("Loss over the steps", plots.loss(history)))
    section.plots.append(Plot("Accuracy over the steps", plots.accuracy(history)))
    rows = [
        (
            "before training" if each.epoch < 0 else str(each.epoch),
            f"{each.step:,}",
            f"{each.loss:.4g}",
            ", ".join(f"{share:.3f}" for share in each.accuracy),
            f"{each.acceptance_length:.2f}",
        )
        for each in history.validations
    ]
    heads = ("validation after epoch", "steps", "loss", "accuracy", "length it would yield")
    section.tables.append(Table(heads, rows, numbers=(1, 2, 4)))
    return section


def _acceptance(lengths: Mapping[str, float]) -> Section:
    from eagle3compat.kimi import plots

    section = Section("Acceptance", ["Tokens that a step of the verifier yields; 1 without draft."])
    section.plots.append(Plot("Acceptance lengths", plots.acceptance(lengths)))
    rows = [(name, f"{length:.3f}") for name, length in lengths.items()]
    section.tables.append(Table(("served", "acceptance length"), rows, numbers=(1,)))
    return section


def _runs(figures: ExtractionFigures) -> Section:
    section = Section("Runs, builds and shims")
    rows = []
    for run in figures.runs:
        record = run.record
        rows.append(
            (
                f"{record.run} of shard {record.shard[0]}",
                _date(record.started),
                f"{run.samples:,}",
                f"{run.tokens:,}",
                "was stopped" if run.seconds is None else _duration(run.seconds),
                "" if run.rate is None else f"{run.rate:,.0f}",
            )
        )
    heads = ("run", "started", "samples", "tokens", "time", "tokens a second")
    section.tables.append(Table(heads, rows, numbers=(2, 3, 5)))
    for description in dict.fromkeys(_describe(run.record) for run in figures.runs):
        section.tables.append(Table(("what", "which"), description))
    return section


def _describe(record: RunRecord) -> tuple[tuple[str, str], ...]:
    """What a run was made with, the same for runs that were made alike."""
    return (
        *sorted(record.builds.items()),
        ("shims", ", ".join(record.shims) or "none"),
        ("model", record.model),
        ("data", record.data),
        ("layers", ", ".join(map(str, record.layers))),
        ("hidden size", str(record.hidden_size)),
        ("dtype", record.dtype),
        *((name, f"{value:,}") for name, value in sorted(record.settings.items())),
    )


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
