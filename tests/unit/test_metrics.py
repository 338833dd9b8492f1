"""The figures of a training: appended, read back over kills, and drawn."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.errors import InputError
from eagle3compat.kimi.metrics import LOGGER, UNTRAINED, Figures, Recorder, plot, read_history


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def trainer() -> Iterator[logging.Logger]:
    """The logger by which speculators' trainer reports."""
    logger = logging.getLogger(LOGGER)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield logger
    logger.setLevel(level)


def report_step(trainer: logging.Logger, step: int, loss: float) -> None:
    figures = {"loss_0": 1.0, "full_acc_0": 0.5, "full_acc_1": 0.25, "cond_acc_0": 0, "loss": loss}
    trainer.info({"train": figures, "epoch": 0, "lr": 0.1}, extra={"step": step})


def report_validation(trainer: logging.Logger, loss: float) -> None:
    figures = {"loss_epoch": loss, "full_acc_0_epoch": 0.5, "full_acc_1_epoch": 0.0}
    trainer.info({"val": figures, "epoch": 0}, extra={"step": 99})


def train(path: Path, trainer: logging.Logger, *steps: tuple[int, float]) -> list[Any]:
    """A run that takes these steps and is killed behind the last."""
    told: list[Mapping[str, Any]] = []
    recorder = Recorder(path, told.append)
    trainer.addHandler(recorder)
    recorder.append({"kind": "run"})
    if steps[0][0] == 0:
        report_validation(trainer, 9.0)
    recorder.epoch = 0
    for step, loss in steps:
        report_step(trainer, step, loss)
    trainer.removeHandler(recorder)
    recorder.close()
    return told


def test_what_the_trainer_reports_is_appended_and_told(path: Path, trainer: logging.Logger) -> None:
    told = train(path, trainer, (0, 4.0))
    assert [json.loads(line) for line in path.read_text().splitlines()] == told
    kinds = [(line["kind"], line.get("epoch"), line.get("step")) for line in told]
    assert kinds == [("run", None, None), ("validation", UNTRAINED, 0), ("train", 0, 0)]
    assert told[2]["accuracy"] == [0.5, 0.25]
    assert told[2]["learning_rate"] == 0.1


def test_steps_that_a_kill_undid_count_once_and_the_later_time(
    path: Path, trainer: logging.Logger
) -> None:
    train(path, trainer, (0, 4.0), (1, 3.0), (2, 2.5))
    with path.open("a") as stream:
        stream.write('{"kind": "train", "ep')  # cut by the kill
    train(path, trainer, (2, 2.0), (3, 1.0))
    history = read_history(path)
    assert [(each.step, each.loss) for each in history.steps] == [(0, 4), (1, 3), (2, 2), (3, 1)]
    assert [(each.epoch, each.loss) for each in history.validations] == [(UNTRAINED, 9.0)]
    assert (history.runs, history.ended) == (2, False)
    assert history.seconds >= 0


def test_the_end_is_seen(path: Path, trainer: logging.Logger) -> None:
    train(path, trainer, (0, 4.0))
    recorder = Recorder(path)
    recorder.append({"kind": "end"})
    recorder.close()
    assert read_history(path).ended


def test_without_a_file_nothing_happened(path: Path) -> None:
    history = read_history(path)
    assert (history.runs, history.steps, history.ended) == (0, (), False)


@pytest.mark.parametrize("line", ["no JSON\n", "[]\n", '{"kind": "train"}\n'])
def test_a_line_of_something_else_is_named(path: Path, line: str) -> None:
    path.write_text('{"kind": "run", "seconds": 0.0}\n' + line)
    with pytest.raises(InputError, match=r"metrics\.jsonl:2: no line of figures"):
        read_history(path)


def test_the_acceptance_length_is_one_and_what_is_accepted() -> None:
    assert Figures(0, 0, 1.0, (0.75, 0.5, 0.25)).acceptance_length == 2.5


def test_the_drawing_appears_whole(path: Path, trainer: logging.Logger) -> None:
    pytest.importorskip("matplotlib")
    train(path, trainer, (0, 4.0), (1, 3.0))
    drawing = path.with_name("training.svg")
    plot(read_history(path), drawing)
    text = drawing.read_text()
    assert "</svg>" in text
    assert {each.name for each in path.parent.iterdir()} == {path.name, drawing.name}
