"""The plots of a report: each an SVG image, as a data URI that a page holds in itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3compat.kimi.extraction_figures import ExtractionFigures, ProofFigures
    from eagle3compat.kimi.metrics import History

_WIDTH, _HEIGHT = 8.0, 3.0
_COLOUR, _WARNING, _QUIET = "#2b6cb0", "#c05621", "#a0aec0"
# Points of a line; more cannot be seen.
_MOST_POINTS = 2000


def progress(figures: ExtractionFigures) -> str:
    """Tokens done over time, with the start of each run."""
    seconds, tokens = figures.progress()
    unit, name = _time_unit(seconds[-1])
    points = _thinned(list(zip(seconds, tokens, strict=True)))

    def draw(axes: Any) -> None:
        times = [time / unit for time, _ in points]
        axes.step(times, [done for _, done in points], where="post", color=_COLOUR)
        _mark_runs(axes, figures, unit)
        axes.set(xlabel=name, ylabel="tokens done", ylim=(0, None))

    return _image(draw)


def rate(figures: ExtractionFigures) -> str:
    """Tokens a second over time, with the start of each run."""
    found = figures.rate()
    unit, name = _time_unit(found.starts[-1] + found.width)

    def draw(axes: Any) -> None:
        edges = [start / unit for start in (*found.starts, found.starts[-1] + found.width)]
        axes.stairs(found.rates, edges, fill=True, color=_COLOUR)
        _mark_runs(axes, figures, unit)
        axes.set(xlabel=name, ylabel="tokens a second", ylim=(0, None))

    return _image(draw)


def norms(by_layer: Mapping[int, Sequence[float]]) -> str:
    """The distribution over samples of a row's mean norm, for each layer."""

    def draw(axes: Any) -> None:
        layers = list(by_layer)
        axes.boxplot(
            [by_layer[layer] for layer in layers],
            tick_labels=[str(layer) for layer in layers],
            whis=(0, 100),
            medianprops={"color": _WARNING},
        )
        values = [norm for layer in layers for norm in by_layer[layer]]
        if min(values) > 0 and max(values) > 30 * min(values):
            axes.set_yscale("log")
        axes.set(xlabel="layer", ylabel="mean norm of a row")

    return _image(draw)


def lengths(tokens: Sequence[int]) -> str:
    """How many samples have how many tokens."""

    def draw(axes: Any) -> None:
        axes.hist(tokens, bins=min(40, len(set(tokens))), color=_COLOUR)
        axes.set(xlabel="tokens of a sample", ylabel="samples")

    return _image(draw)


def shortfalls(proofs: ProofFigures) -> str:
    """Of tokens without the largest logit: what they lack, by what rounding explains."""

    def draw(axes: Any) -> None:
        axes.hist(proofs.shares, bins=20, color=_COLOUR)
        axes.axvline(1.0, color=_WARNING)
        axes.set(xlabel="shortfall, in units of what rounding explains", ylabel="samples")

    return _image(draw)


def loss(history: History) -> str:
    """Training and validation loss over the steps."""
    steps = _thinned(list(history.steps))

    def draw(axes: Any) -> None:
        axes.plot(
            [each.step for each in steps],
            [each.loss for each in steps],
            lw=0.8,
            color=_QUIET,
            label="training",
        )
        axes.plot(
            [each.step for each in history.validations],
            [each.loss for each in history.validations],
            "o-",
            color=_COLOUR,
            label="validation",
        )
        axes.set(xlabel="step", ylabel="loss")
        axes.legend()

    return _image(draw)


def accuracy(history: History) -> str:
    """Accuracy of each draft token over the steps; points are validations."""
    steps = _thinned(list(history.steps))
    seen = (*history.steps, *history.validations)
    draft_tokens = min((len(each.accuracy) for each in seen), default=0)

    def draw(axes: Any) -> None:
        for place in range(draft_tokens):
            values = [each.accuracy[place] for each in steps]
            (line,) = axes.plot([each.step for each in steps], values, lw=0.8, alpha=0.4)
            checked = [each.step for each in history.validations]
            values = [each.accuracy[place] for each in history.validations]
            label = f"draft token {place + 1}"
            axes.plot(checked, values, "o-", color=line.get_color(), label=label)
        axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1))
        if draft_tokens:
            axes.legend()

    return _image(draw)


def acceptance(lengths: Mapping[str, float]) -> str:
    """Acceptance lengths side by side; 1 is what a verifier yields alone."""

    def draw(axes: Any) -> None:
        bars = axes.barh(list(lengths), list(lengths.values()), color=_COLOUR)
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.axvline(1.0, color=_WARNING)
        axes.invert_yaxis()
        axes.set(xlabel="acceptance length (tokens a step of the verifier)", xlim=(0, None))

    return _image(draw, height=0.8 + 0.45 * len(lengths))


def _mark_runs(axes: Any, figures: ExtractionFigures, unit: float) -> None:
    for number, run in enumerate(figures.runs):
        at = (run.record.started - figures.start) / unit
        axes.axvline(at, color=_WARNING, lw=0.8, ls="--", label="" if number else "start of a run")
    axes.legend(loc="lower right")


def _time_unit(seconds: float) -> tuple[float, str]:
    for unit, name in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds > 3 * unit:
            return unit, f"{name} since the first start"
    return 1.0, "seconds since the first start"


def _thinned(points: list[Any]) -> list[Any]:
    """At most so many points, the last one among them."""
    step = -(-len(points) // _MOST_POINTS) or 1
    return points if step == 1 else [*points[::step], points[-1]]


def _image(draw: Callable[[Any], None], height: float = _HEIGHT) -> str:
    """An SVG image as a data URI, the same bytes for the same figures."""
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, in the reader's font; ids are no random ones.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "eagle3compat", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"
