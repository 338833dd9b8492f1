"""Facts kept between runs, one JSON file a build. A cache that cannot be used is no error."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

SCHEMA = 4
"""Raise this whenever the records, or what is read into them, change."""


def user_cache_dir() -> Path:
    """The folder of this package below the user's cache folder (XDG_CACHE_HOME or ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base if base else Path.home() / ".cache") / "eagle3compat"


class FactsCache:
    """Plain values by build and name, each valid for one fingerprint of the text it came from.

    Args:
        folder: where the files lie; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._builds: dict[str, dict[str, Any]] = {}
        self._changed: set[str] = set()

    @classmethod
    def of_user(cls) -> FactsCache:
        """The cache in the user's cache folder."""
        try:
            return cls(user_cache_dir() / "facts")
        except RuntimeError:  # No home folder.
            return cls(None)

    def get(self, build: str, name: str, fingerprint: str | None) -> Any:
        """The value kept under a name, None where there is none for this fingerprint."""
        kept = self._of_build(build).get(name)
        if fingerprint is None or not isinstance(kept, list) or len(kept) != 2:
            return None
        return kept[1] if kept[0] == fingerprint else None

    def put(self, build: str, name: str, fingerprint: str | None, value: Any) -> None:
        """Keep a value until ``save``."""
        if fingerprint is not None:
            self._of_build(build)[name] = [fingerprint, value]
            self._changed.add(build)

    def save(self) -> None:
        """Write what was added; each file appears whole or not at all."""
        import tempfile  # Costs more to import than all the rest here, and is seldom needed.

        while self._changed and self._folder is not None:
            build = self._changed.pop()
            content = json.dumps(self._builds[build], separators=(",", ":"))
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                handle, temporary = tempfile.mkstemp(dir=self._folder, suffix=".part")
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    stream.write(content)
                Path(temporary).replace(self._file(build))
            except OSError:
                self._folder = None  # Not writable: facts are read again the next time.

    def _of_build(self, build: str) -> dict[str, Any]:
        if build not in self._builds:
            self._builds[build] = self._load(build)
        return self._builds[build]

    def _load(self, build: str) -> dict[str, Any]:
        if self._folder is None:
            return {}
        try:
            loaded = json.loads(self._file(build).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def _file(self, build: str) -> Path:
        # What a text says depends on the Python that reads it: version_info checks, syntax.
        key = f"{SCHEMA}|{sys.version_info[0]}.{sys.version_info[1]}|{build}"
        return (self._folder or Path()) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
