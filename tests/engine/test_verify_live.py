"""The live level agrees with the static one on the installed pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.shim import Stage, shim

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, "-m", "eagle3compat", "verify-patches", "--level", "live", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads(done.stdout)["reports"]
    assert isinstance(found, dict)
    return found


def live(report: dict[str, Any], site: str) -> list[dict[str, Any]]:
    return [
        each for each in report["checks"] if each["kind"] == "live" and each["call_site"] == site
    ]


@pytest.mark.parametrize("process", ["parent process", "worker process"])
def test_every_shim_of_the_plan_is_live_where_it_acts(process: str, report: dict[str, Any]) -> None:
    found = live(report, process)
    assert found
    assert {each["verdict"] for each in found} == {"holds"}


def test_both_processes_together_carry_the_whole_plan(report: dict[str, Any]) -> None:
    repaired = {each["shim"] for each in report["checks"] if each["verdict"] == "repaired"}
    # Those for training alone act in a process that trains.
    planned = {each for each in repaired if Stage.EXTRACTION in shim(each).stages}
    carried = {
        each["shim"] for name in ("parent", "worker") for each in live(report, f"{name} process")
    }
    assert carried == planned


def test_live_signatures_are_what_the_text_said(report: dict[str, Any]) -> None:
    found = live(report, "live object")
    assert {each["symbol"] for each in found} >= {
        "vllm.v1.request.Request",
        "vllm.v1.core.sched.scheduler.Scheduler",
        "vllm.config.SchedulerConfig",
    }
    assert [each["reason"] for each in found if each["verdict"] != "holds"] == []
