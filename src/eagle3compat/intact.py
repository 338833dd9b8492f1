"""Whether installed files are what their wheel installed: people patch site-packages by hand."""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Iterable

from eagle3compat.installed import Build


def edited_modules(build: Build, modules: Iterable[str]) -> dict[str, str]:
    """Modules whose files differ from the wheel's RECORD, with their paths.

    Args:
        build: an installed build; one without a RECORD has nothing to compare with.
        modules: dotted names to look at.
    """
    if build.metadata_dir is None or build.kind != "wheel":
        return {}
    recorded = _recorded(build)
    edited = {}
    for module in modules:
        stem = module.replace(".", "/")
        for path in (f"{stem}/__init__.py", f"{stem}.py"):
            digest = recorded.get(path)
            file = build.root / path
            if digest is not None and (not file.is_file() or _sha256(file.read_bytes()) != digest):
                edited[module] = str(file)
    return edited


def _recorded(build: Build) -> dict[str, str]:
    """The SHA-256 of each Python file by path, as RECORD writes it."""
    assert build.metadata_dir is not None
    try:
        text = (build.metadata_dir / "RECORD").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    rows = csv.reader(line for line in text.splitlines() if ".py," in line)
    return {
        row[0]: row[1].removeprefix("sha256=")
        for row in rows
        if len(row) >= 2 and row[1].startswith("sha256=")
    }


def _sha256(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
