"""``eagle3compat --version``: our version, and the builds that it stands between."""

from __future__ import annotations

import platform

import eagle3compat
from eagle3compat.commands.showing import build_line
from eagle3compat.errors import BuildNotFoundError
from eagle3compat.installed import PACKAGES, find_build


def version_lines() -> list[str]:
    """One line a package: distribution, version, commit where it is told, and folder."""
    ours = f"{eagle3compat.__version__} on Python {platform.python_version()}"
    return [f"eagle3compat {ours}", *(f"{name:<13}{_found(name)}" for name in PACKAGES)]


def _found(package: str) -> str:
    try:
        return build_line(find_build(package))
    except BuildNotFoundError as error:
        return f"none: {error}"
