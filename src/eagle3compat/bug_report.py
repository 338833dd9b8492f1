"""One file with what a maintainer would ask for, and nothing private in it."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import eagle3compat
from eagle3compat.errors import BuildNotFoundError, InputError
from eagle3compat.installed import PACKAGES, find_build

_VARIABLES = re.compile(r"^(VLLM_|EAGLE3COMPAT_|CUDA_VISIBLE_DEVICES$|HF_HUB_OFFLINE$|OMP_NUM)")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL|URL|HOST|USER", re.IGNORECASE)
_SECRETS = (
    (re.compile(r"\b(hf|sk|ghp|github_pat|glpat|xox[a-z])[-_][A-Za-z0-9_-]{8,}"), "<secret>"),
    (re.compile(r"(?i)\bauthorization:.*|\bbearer\s+\S+"), "<secret>"),
    (re.compile(r"(?i)\b(token|password|secret|api[_-]?key)=\S+"), r"\1=<secret>"),
    (re.compile(r"([a-z][a-z0-9+.-]*://)[^/\s:@]+:[^/\s@]+@"), r"\1<secret>@"),
    (re.compile(r"[\w.+-]+@[\w-]+\.[\w.]+"), "<address>"),
    (re.compile(r"/(?:home|Users)/[^/\s\"']+"), "~"),
)
_TRACEBACK = "Traceback (most recent call last):"
_MAX_ERROR_LINES = 200


def write_bug_report(out: Path, log: Path | None = None) -> Path:
    """Write the report.

    Args:
        out: the file to write; one that exists is replaced.
        log: a log whose last traceback is added.

    Returns:
        The file, resolved.

    Raises:
        InputError: the log cannot be read, or the file not written.
    """
    lines = [
        "# eagle3compat bug report",
        "",
        f"eagle3compat {eagle3compat.__version__}, Python {platform.python_version()} "
        f"({platform.python_implementation()}), {platform.system()} {platform.machine()}",
        "",
        *_builds(),
        *_judgement(),
        *_environment(),
        *_last_error(log),
    ]
    try:
        out.write_text(without_secrets("\n".join(lines)) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}). Give --out.") from error
    return out.resolve()


def without_secrets(text: str) -> str:
    """The text without home folders, user and host names, addresses, tokens and passwords."""
    for home in {str(Path.home()), os.environ.get("HOME", "")} - {"", "/"}:
        text = text.replace(home, "~")
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    for name in {platform.node(), os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}:
        if len(name) > 2:
            text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text


def _builds() -> Iterator[str]:
    yield "## Builds"
    yield ""
    for package in PACKAGES:
        try:
            build = find_build(package)
        except BuildNotFoundError as error:
            yield f"- {package}: {error}"
        else:
            yield (
                f"- {package}: {build.distribution or 'no distribution'} {build.version}, "
                f"{build.kind}, commit {build.commit or 'unknown'}, in {build.package_dir}"
            )
    yield ""


def _judgement() -> Iterator[str]:
    """The plan's decisions with every other check, as verify-patches has them."""
    from eagle3compat.table import short
    from eagle3compat.verification import verify

    yield "## Plan and checks"
    yield ""
    try:
        report = verify()
    except InputError as error:
        yield f"not made: {error}"
        yield ""
        return
    yield f"route {report.route}, verdict {report.verdict.value}"
    yield from (f"note: {note}" for note in report.notes)
    yield ""
    for check in report.checks:
        if check.kind == "contract" or check in report.problems:
            shim = f" [{check.shim}]" if check.shim else ""
            place = short(check.call_site, report)
            yield f"- {check.verdict.value}{shim} {place} -> {check.symbol}: {check.reason}"
            if check.expected.startswith("expected"):
                yield f"  - {check.expected}"
    yield ""
    yield "## Files edited by hand"
    yield ""
    for edited in report.edited:
        stands_in_for = ", ".join(edited.stands_in_for) or "no shim that is known"
        yield f"- {edited.path}, stands in for {stands_in_for}"
    if not report.edited:
        yield "none among the modules that matter"
    yield ""


def _environment() -> Iterator[str]:
    yield "## Environment variables"
    yield ""
    for name in sorted(os.environ):
        if _VARIABLES.match(name):
            value = "<not shown>" if _SECRET_NAME.search(name) else os.environ[name]
            yield f"- {name}={value}"
    yield f"- executable: {sys.executable}"
    yield ""


def _last_error(log: Path | None) -> Iterator[str]:
    if log is None:
        return
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{log} cannot be read ({error.strerror}).") from error
    yield "## Last error"
    yield ""
    yield "```"
    start = text.rfind(_TRACEBACK)
    lines = text[start if start >= 0 else 0 :].splitlines()
    yield from lines[:_MAX_ERROR_LINES] if start >= 0 else lines[-_MAX_ERROR_LINES:]
    yield "```"
