"""resumed-schedule: a run that is taken up goes on at the learning rate that it was left at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from probing import Builds
from standins import carried_out, module_with

from eagle3compat.shim import TRAINER, Status
from eagle3compat.shims.resumed_schedule import SHIM

LOADED = "self.checkpointer.load_scheduler_state_dict(self.scheduler)"


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        assert LOADED in builds.text(TRAINER).splitlines()[(finding.line or 0) - 1]


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(TRAINER, LOADED, f"{LOADED}; self.scheduler.step()"),
        installed.without(TRAINER),
        installed.without_text(TRAINER),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def trained(resume: bool, previous_epoch: int, scheduled: bool = True) -> Any:
    """A trainer whose schedule was left at 0.5, and whose optimizer is at another rate."""

    class Trainer:
        def __init__(self) -> None:
            self.resume_from_checkpoint = resume
            self.checkpointer = SimpleNamespace(previous_epoch=previous_epoch)
            self.setup_optimizer()

        def setup_optimizer(self) -> None:
            self.opt = SimpleNamespace(param_groups=[{"lr": 0.1}])
            schedule = SimpleNamespace(get_last_lr=lambda: [0.5])
            self.scheduler = schedule if scheduled else None

    with carried_out(module := module_with(TRAINER, Trainer=Trainer), SHIM.id):
        return module.Trainer()


@pytest.mark.parametrize(
    ("trainer", "rate"),
    [
        ((True, 3), 0.5),
        ((True, 0), 0.5),
        ((True, -1), 0.1),
        ((False, 3), 0.1),
        ((True, 3, False), 0.1),
    ],
)
def test_the_rate_is_the_schedules_where_a_run_is_taken_up(trainer: Any, rate: float) -> None:
    assert trained(*trainer).opt.param_groups == [{"lr": rate}]
