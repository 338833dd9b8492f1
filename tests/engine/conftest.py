"""What engine tests share: checkpoints, and scripts in interpreters of their own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from running import Run, run_script

from eagle3compat.tiny.checkpoint import write_tiny_kimi
from eagle3compat.tiny.configuration import Variant


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs packages that are not there; where they are, nothing is skipped."""
    for marker, packages in {
        "engine": ("vllm", "speculators"),
        "training": ("speculators",),
    }.items():
        if all(importlib.util.find_spec(name) for name in packages):
            continue
        for item in items:
            if item.get_closest_marker(marker):
                missing = f"{' and '.join(packages)} are not installed"
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi-K2.5."""
    folder = tmp_path_factory.mktemp("checkpoints") / "kimi"
    write_tiny_kimi(folder)
    return folder


@pytest.fixture(scope="session")
def other_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the same shape with other weights: what agrees with it agrees by accident."""
    folder = tmp_path_factory.mktemp("checkpoints") / "other"
    write_tiny_kimi(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def plain_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The language model of the tiny Kimi as a checkpoint of its own."""
    folder = tmp_path_factory.mktemp("checkpoints") / "deepseek"
    write_tiny_kimi(folder, variant=Variant(text_only=True))
    return folder


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run ``python ARGUMENTS… OUT`` and give what it wrote to OUT as JSON."""

    def run(*arguments: str | Path, environment: dict[str, str] | None = None) -> Any:
        out = tmp_path_factory.mktemp("outcome") / "outcome.json"
        done = run_script(*arguments, out, environment=environment)
        assert out.exists(), done.stderr[-5000:]
        return json.loads(out.read_text())

    return run
