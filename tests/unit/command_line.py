"""Running the command line as a user does, beside builds that are laid out but never imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import eagle3compat

OURS = Path(eagle3compat.__file__).resolve().parent.parent
GENERATOR = "speculators/data_generation/vllm_hidden_states_generator.py"


def lay_out_builds(folder: Path, speculators: str = "0.3.0", *, generator: bool = True) -> Path:
    """Folders that `find_build` takes for vLLM 0.16.0 and a speculators.

    Importing either fails, so a test that passes shows that nothing imported them.
    """
    for package, version in (("vllm", "0.16.0"), ("speculators", speculators)):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise AssertionError('imported')\n")
        (folder / package / "version.py").write_text(f"__version__ = '{version}'\n")
    if generator:
        (folder / GENERATOR).parent.mkdir()
        (folder / GENERATOR).touch()
    return folder


def call(
    *command: str | Path, builds: Path, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with our package and the given builds first on its path.

    Args:
        command: arguments of the interpreter.
        builds: from `lay_out_builds`.
        folder: working directory.
        environment: variables to set.
    """
    path = os.pathsep.join((str(builds), str(OURS)))
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def the_error(process: subprocess.CompletedProcess[str]) -> str:
    """The one line that bad input earns; fails when there is more, or another exit code."""
    assert process.returncode == 2, process.stderr
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ")
    return line
