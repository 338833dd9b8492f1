"""Finds the Python that a cell wants, wherever this machine keeps it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version


class NoInterpreter(Exception):
    """This machine has no Python of the version that is wanted, and none can be fetched."""


def find_python(version: str, uv: str) -> str:
    """Path of a Python of this version: uv's, one on the path, pyenv's, or a download.

    Args:
        version: two or three parts, as in ``3.12``.
        uv: path of uv.

    Raises:
        NoInterpreter: there is none, and uv cannot download one.
    """
    # A shim of pyenv on the path answers for the version alone that PYENV_VERSION selects: its
    # folder of versions is looked at too.
    for candidate in (_find(uv, version), *map(str, _in_pyenv(version))):
        if candidate and _runs(candidate, version):
            return candidate
    fetched = _uv(uv, "python", "install", version)
    found = _find(uv, version)
    if found and _runs(found, version):
        return found
    raise NoInterpreter(
        f"Python {version}: none on the path, in pyenv's versions or uv's, and uv python install "
        f"{version} says: {' '.join(fetched.stderr.split())[-200:]}"
    )


def _find(uv: str, version: str) -> str:
    options = ("--system", "--no-project", "--no-python-downloads")
    return _uv(uv, "python", "find", *options, version).stdout.strip()


def _in_pyenv(version: str) -> Iterator[Path]:
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    names = [path.name for path in root.glob(f"versions/{version}*")]
    plain = [name for name in names if re.fullmatch(r"\d+(\.\d+)+", name)]
    for name in sorted(plain, key=Version, reverse=True):
        yield root / "versions" / name / "bin" / "python"


def _runs(python: str, version: str) -> bool:
    try:
        told = subprocess.run(
            [python, "-c", "import platform; print(platform.python_version())"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
    except OSError:
        return False
    return f"{told}.".startswith(f"{version}.")


def _uv(uv: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([uv, *arguments], capture_output=True, text=True, check=False)
