"""``eagle3compat run`` runs a script as the interpreter itself would."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import call, lay_out_builds, the_error

LOOK = """
import json, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "spec": __spec__ and __spec__.name, "package": __package__,
    "loader": type(__loader__).__name__,
}))
"""
SPAWN = """
import multiprocessing, helper, sys

class Job:
    def __init__(self, number): self.number = number

def work(job): return (job.number * helper.FACTOR, __name__, sys.argv[1:])

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(work, [Job(1), Job(2)]))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with scripts; its speculators needs no shims."""
    lay_out_builds(tmp_path / "builds", "0.5.0", generator=False)
    scripts = tmp_path / "scripts"
    (scripts / "package").mkdir(parents=True)
    (scripts / "helper.py").write_text("FACTOR = 10\n")
    (scripts / "look.py").write_text(LOOK)
    (scripts / "spawn.py").write_text(SPAWN)
    (scripts / "package" / "__init__.py").touch()
    (scripts / "package" / "__main__.py").write_text(LOOK)
    return tmp_path


def both(place: Path, folder: str, *arguments: str) -> tuple[str, str]:
    """What the interpreter prints for a script, and what we print."""
    builds, inside = place / "builds", place / folder
    plain = call(*arguments, builds=builds, folder=inside)
    ours = call("-m", "eagle3compat", "run", *arguments, builds=builds, folder=inside)
    assert (plain.returncode, ours.returncode) == (0, 0), ours.stderr
    return plain.stdout, ours.stdout


@pytest.mark.parametrize(
    ("folder", "arguments"),
    [
        (".", ["scripts/look.py"]),
        ("scripts", ["look.py", "--help", "-m", "--", "--version", "a b"]),
        ("scripts", ["-m", "look", "--help", "--", "-x"]),
        ("scripts", ["-m", "package", "x"]),
    ],
)
def test_a_script_sees_what_the_interpreter_would_show_it(
    place: Path, folder: str, arguments: list[str]
) -> None:
    plain, ours = map(json.loads, both(place, folder, *arguments))
    assert ours == plain


def test_spawned_processes_find_the_script_as_their_main_module(place: Path) -> None:
    plain, ours = both(place, ".", "scripts/spawn.py", "--flag")
    assert ours == plain
    assert "(20, '__mp_main__', ['--flag'])" in ours


@pytest.mark.parametrize(
    ("body", "code"),
    [("import sys; sys.exit(7)", 7), ("raise SystemExit", 0), ("1 / 0", 1), ("exit('no')", 1)],
)
def test_the_exit_code_is_the_scripts(place: Path, body: str, code: int) -> None:
    (place / "script.py").write_text(body)
    command = ("-m", "eagle3compat", "run", place / "script.py")
    assert call(*command, builds=place / "builds").returncode == code


def test_an_exception_of_the_script_shows_its_own_traceback(place: Path) -> None:
    (place / "script.py").write_text("input()")
    command = ("-m", "eagle3compat", "run", place / "script.py")
    process = call(*command, builds=place / "builds")
    assert process.returncode == 1
    assert "Traceback (most recent call last)" in process.stderr
    assert process.stderr.splitlines()[-1].startswith("EOFError")


def test_the_plan_is_applied_before_the_script_starts(place: Path) -> None:
    (place / "script.py").write_text("import eagle3compat; print(eagle3compat.status().applied)")
    command = ("-m", "eagle3compat", "run", place / "script.py")
    assert call(*command, builds=place / "builds").stdout == "True\n"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [([], "expected a script"), (["-m"], "expected a script"), (["none.py"], "no script"),
     (["-v", "look.py"], "-v is no option of run")],
)  # fmt: skip
def test_bad_input_to_run_is_one_line(place: Path, arguments: list[str], fault: str) -> None:
    command = ("-m", "eagle3compat", "run", *arguments)
    assert fault in the_error(call(*command, builds=place / "builds"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="safe-path mode is of Python 3.11")
def test_safe_path_mode_keeps_the_scripts_folder_off_the_path(place: Path) -> None:
    command = ("-m", "eagle3compat", "run", place / "scripts" / "spawn.py")
    process = call(*command, builds=place / "builds", PYTHONSAFEPATH="1")
    assert process.returncode == 1
    assert "No module named 'helper'" in process.stderr
