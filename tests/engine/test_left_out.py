"""Every shim is left out once: each break is seen to raise, each silent one to differ.

The cases that need an engine take a while and are run by ``nox -s leave-one-out``.
"""

from __future__ import annotations

from pathlib import Path

import left_out
import pytest
from left_out import CASES, NOT_SEEN_HERE
from running import Run

import eagle3compat

pytestmark = pytest.mark.engine

WITHOUT = [
    pytest.param(name, marks=[pytest.mark.leave_one_out] if case.needs_engine else [])
    for name, case in CASES.items()
]


@pytest.mark.parametrize("name", WITHOUT)
def test_without_it_the_fault_is_seen(
    name: str, run_python: Run, kimi: Path, plain_deepseek: Path
) -> None:
    case = CASES[name]
    checkpoint = plain_deepseek if case.text_only else kimi
    without = {"EAGLE3COMPAT_DISABLE": ",".join(case.left_out)}
    seen = run_python(left_out.__file__, name, checkpoint, environment=without)
    assert case.expected in seen


@pytest.mark.leave_one_out
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.otherwise != "right"]
)
def test_with_it_the_fault_is_not_seen(name: str, run_python: Run, kimi: Path) -> None:
    seen = run_python(left_out.__file__, name, kimi)
    assert CASES[name].otherwise in seen
    assert CASES[name].expected not in seen


def test_every_shim_that_is_needed_has_a_case() -> None:
    needed = {decision.shim.id for decision in eagle3compat.installed_plan().needed}
    covered = {name for case in CASES.values() for name in case.left_out}
    assert needed == covered | set(NOT_SEEN_HERE)
