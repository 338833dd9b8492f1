"""The figures of a training, as they come: ``metrics.jsonl``, read back, summed up and drawn.

Each line is a JSON object: ``run`` (one start), ``train`` (one step), ``validation`` (epoch -1 is
before the first step) or ``end``. Lines are only ever appended; a run that is taken up goes
over steps again that a kill had left without a checkpoint, and the later line counts.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from eagle3compat.errors import InputError

LOGGER = "speculators.metrics"
"""Where speculators' trainer reports."""
UNTRAINED = -1
"""The epoch of a validation before the first step."""
Report = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Figures:
    """Loss and accuracy of one step, or of one validation.

    Args:
        epoch: counted from 0; -1 for the validation before training.
        step: counted from 0 over all epochs; for a validation, the steps before it.
        loss: of speculators: summed over the draft's steps.
        accuracy: for each draft step, the share of positions at which it and all before it were
            the verifier's greedy token, among the tokens that the draft has.
        learning_rate: of the step; None for a validation.
    """

    epoch: int
    step: int
    loss: float
    accuracy: tuple[float, ...]
    learning_rate: float | None = None

    @property
    def acceptance_length(self) -> float:
        """Tokens a verifier's step would yield if serving met the same text: 1 + the accuracies."""
        return 1 + sum(self.accuracy)


@dataclass(frozen=True)
class History:
    """What ``metrics.jsonl`` says.

    Args:
        runs: starts so far.
        steps: training steps, in order, each once.
        validations: in order, by the steps before each.
        seconds: of all runs together, as far as their lines tell.
        ended: whether training came to its end.
    """

    runs: int
    steps: tuple[Figures, ...]
    validations: tuple[Figures, ...]
    seconds: float
    ended: bool


class Recorder(logging.Handler):
    """Takes what speculators' trainer reports, appends it, and passes it on.

    Args:
        path: of ``metrics.jsonl``.
        report: called with each line's content after it is written; None for nobody.

    Attributes:
        step: steps so far, those of earlier runs included.
        epoch: under way; what the trainer calls so may be a part of one.
    """

    def __init__(self, path: Path, report: Report | None = None) -> None:
        super().__init__()
        self.step = 0
        self.epoch = UNTRAINED
        self._report = report
        self._started = time.monotonic()
        self._stream: TextIO = _append_to(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one report of the trainer."""
        content: Any = record.msg
        if "train" in content:
            self.step = getattr(record, "step", self.step)
            figures = content["train"]
            self.write("train", figures, learning_rate=content["lr"])
            self.step += 1
        elif "val" in content:
            figures = {name.removesuffix("_epoch"): each for name, each in content["val"].items()}
            self.write("validation", figures)

    def write(self, kind: str, figures: Mapping[str, float], **more: Any) -> None:
        """Append one line of figures, as speculators names them."""
        accuracy = [figures[f"full_acc_{step}"] for step in range(_draft_steps(figures))]
        line = {"kind": kind, "epoch": self.epoch, "step": self.step, "loss": figures["loss"]}
        self.append(line | {"accuracy": accuracy, **more})

    def append(self, line: Mapping[str, Any]) -> None:
        """Append one line, with the seconds since this run began."""
        line = {**line, "seconds": round(time.monotonic() - self._started, 3)}
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()
        if self._report is not None:
            self._report(line)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        super().close()


def _draft_steps(figures: Mapping[str, float]) -> int:
    return sum(name.startswith("full_acc_") for name in figures)


def _append_to(path: Path) -> TextIO:
    """Open for appending, behind the last whole line."""
    if path.exists():
        content = path.read_bytes()
        with path.open("r+b") as stream:
            stream.truncate(content.rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def read_history(path: Path) -> History:
    """Read ``metrics.jsonl``; empty where there is none.

    Raises:
        InputError: a line that is no record, other than a cut last one.
    """
    rows = list(_rows(path))
    steps: dict[int, Figures] = {}
    validations: dict[int, Figures] = {}
    seconds, runs, latest = 0.0, 0, 0.0
    for row in rows:
        if row["kind"] == "run":
            seconds, runs, latest = seconds + latest, runs + 1, 0.0
        latest = row["seconds"]
        if row["kind"] == "train":
            steps[row["step"]] = _figures(row)
        elif row["kind"] == "validation":
            validations[row["step"]] = _figures(row)
    return History(
        runs,
        tuple(steps[step] for step in sorted(steps)),
        tuple(validations[step] for step in sorted(validations)),
        seconds + latest,
        any(row["kind"] == "end" for row in rows),
    )


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            try:
                row: dict[str, Any] = json.loads(line)
                _ = row["kind"], row["seconds"]
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(f"{path}:{number}: no line of figures ({error!r})") from error
            yield row


def _figures(row: Mapping[str, Any]) -> Figures:
    return Figures(
        row["epoch"], row["step"], row["loss"], tuple(row["accuracy"]), row.get("learning_rate")
    )


def can_plot() -> bool:
    """Whether matplotlib is there."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def plot(history: History, path: Path) -> None:
    """Draw loss and accuracy over the steps, into an SVG or PNG file that appears whole."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    loss, accuracy = figure.subplots(2, 1, sharex=True)
    at = [each.step for each in history.steps]
    loss.plot(at, [each.loss for each in history.steps], lw=0.8, label="training")
    checked = [each.step for each in history.validations]
    loss.plot(checked, [each.loss for each in history.validations], "o-", label="validation")
    loss.set_ylabel("loss")
    loss.legend()
    draft_steps = len(history.steps[0].accuracy) if history.steps else 0
    for step in range(draft_steps):
        values = [each.accuracy[step] for each in history.steps]
        (line,) = accuracy.plot(at, values, lw=0.8, alpha=0.5)
        values = [each.accuracy[step] for each in history.validations]
        label = f"draft token {step + 1}"
        accuracy.plot(checked, values, "o-", color=line.get_color(), label=label)
    accuracy.set(xlabel="step", ylabel="accuracy", ylim=(0, 1))
    accuracy.legend()
    unfinished = path.with_name(f".unfinished-{path.name}")
    figure.savefig(unfinished)
    unfinished.replace(path)
