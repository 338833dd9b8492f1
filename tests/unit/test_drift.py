"""drift names what changed, and only what a contract or a call touches."""

from __future__ import annotations

from pathlib import Path

import pytest
from handmade import write_package

from eagle3compat.drift import find_drift

CONSUMER = {
    "speculators.data_generation.g": (
        "from vllm.core import LIMIT, make, Engine\nmake(1)\nEngine().run()\n"
    )
}
BEFORE = """
LIMIT = 1
UNTOUCHED = 1
class Engine:
    def run(self, old=1): ...
def make(x, gone=0): ...
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def changes(tmp_path: Path, after: str) -> list[tuple[str, str, str]]:
    first = write_package(tmp_path / "before", {"vllm.core": BEFORE})
    second = write_package(tmp_path / "after", {"vllm.core": after})
    consumer = write_package(tmp_path / "consumer", CONSUMER)
    found = find_drift(first, second, consumer)
    return [(each.symbol.removeprefix("vllm."), each.kind, each.detail) for each in found.changes]


def test_equal_builds_have_no_drift(tmp_path: Path) -> None:
    assert changes(tmp_path, BEFORE) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("x, gone=0", "x, new"), ("core.make", "signature", "gone removed; new added (required)")),
        (("x, gone=0", "x, gone"), ("core.make", "signature", "gone became required")),
        (("x, gone=0", "x, *, gone=0"), ("core.make", "signature", "gone became keyword-only")),
        (("def make", "async def make"), ("core.make", "signature", "became a coroutine function")),
        (("def make", "def other"), ("core.make", "gone", "no longer there")),
        (("LIMIT = 1", "LIMIT = 2"), ("core.LIMIT", "value", "2, was 1")),
        (("old=1): ...", "old=1): pass"), ("core.Engine.run", "body", "its text changed")),
    ],
)
def test_a_change_is_named(
    change: tuple[str, str], expected: tuple[str, str, str], tmp_path: Path
) -> None:
    assert expected in changes(tmp_path, BEFORE.replace(*change))


def test_what_nobody_touches_is_not_listed(tmp_path: Path) -> None:
    assert changes(tmp_path, BEFORE.replace("UNTOUCHED = 1", "UNTOUCHED = 2")) == []
