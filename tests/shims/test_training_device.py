"""training-device: model and batches go to the CPU where there is no accelerator."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from probing import Builds
from standins import carried_out, module_with

from eagle3compat import settled
from eagle3compat.shim import TRAINER, Status
from eagle3compat.shims.training_device import SHIM

MOVED = "self.model.to(self.local_rank)"


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        assert finding.conditional
        assert MOVED in builds.text(TRAINER).splitlines()[(finding.line or 0) - 1]


@pytest.mark.parametrize(
    ("old", "new"),
    [(MOVED, "self.model.to(self.device)"), ("loss.backward()", "(2 * loss).backward()")],
)
def test_drift_where_either_function_was_edited(installed: Builds, old: str, new: str) -> None:
    assert installed.edited(TRAINER, old, new).probe(SHIM).status is Status.DRIFT


def test_drift_where_the_module_cannot_be_read(installed: Builds) -> None:
    for builds in (installed.without(TRAINER), installed.without_text(TRAINER)):
        assert builds.probe(SHIM).status is Status.DRIFT


def trainer_module(accelerator: bool) -> ModuleType:
    class Trainer:
        def __init__(self, local_rank: Any) -> None:
            self.local_rank = local_rank
            self.setup_trainer()

        def setup_trainer(self) -> None:
            self.global_step = 0

    torch = SimpleNamespace(accelerator=SimpleNamespace(is_available=lambda: accelerator))
    return module_with(TRAINER, Trainer=Trainer, torch=torch)


@pytest.mark.parametrize(
    ("accelerator", "given", "expected"),
    [(False, 0, "cpu"), (False, "meta", "meta"), (True, 0, 0), (True, 1, 1), (True, "cpu", "cpu")],
)
def test_a_number_is_a_device_only_where_there_are_any(
    accelerator: bool, given: Any, expected: Any
) -> None:
    with carried_out(module := trainer_module(accelerator), SHIM.id):
        trainer = module.Trainer(given)
    assert trainer.local_rank == expected
    assert trainer.global_step == 0
    assert ("no accelerator" in settled.choices()[SHIM.id]) is (given != expected)
