"""Where conversations come from: a ``.jsonl`` file, or whatever ``datasets`` loads.

Rows are read one after another, so that a data set may be larger than memory, and from any place
that was reached before, so that work can be taken up again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from eagle3compat.errors import InputError

JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Place:
    """Where reading stands: how many rows are behind it, and at which byte or row it goes on."""

    rows: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Row:
    """One row as it was read.

    Attributes:
        source: its line, from 1, of a file; its number, from 0, of a data set.
        content: the line's bytes, or the row.
        after: where reading goes on behind it.
    """

    source: int
    content: bytes | dict[str, Any]
    after: Place


class Rows(Protocol):
    """Rows of one data set.

    Attributes:
        unit: what `size` and the offsets of places count, ``"bytes"`` or ``"rows"``.
        size: of the whole, or None where it is not known.
    """

    unit: str
    size: int | None

    def identity(self) -> dict[str, Any]:
        """What tells this data set from another, for JSON."""

    def read(self, place: Place) -> Iterator[Row]:
        """Rows from a place on; blank lines are left out."""


class JsonLines:
    """The lines of a file."""

    unit = "bytes"

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.size: int | None = path.stat().st_size
        except OSError as error:
            raise InputError(f"--data {path}: cannot be read ({error})") from error

    def identity(self) -> dict[str, Any]:
        """Name, size and digest of the file; its folder may change."""
        hashed = blake2b(digest_size=16)
        try:
            with self._path.open("rb") as stream:
                while block := stream.read(1 << 16):
                    hashed.update(block)
        except OSError as error:
            raise InputError(f"--data {self._path}: cannot be read ({error})") from error
        return {"file": self._path.name, "bytes": self.size, "blake2b": hashed.hexdigest()}

    def read(self, place: Place) -> Iterator[Row]:
        """Lines from a place on."""
        number, offset = place.rows, place.offset
        try:
            with self._path.open("rb") as stream:
                stream.seek(offset)
                for line in stream:
                    number, offset = number + 1, offset + len(line)
                    if line.strip():
                        yield Row(number, line, Place(number, offset))
        except OSError as error:
            raise InputError(f"--data {self._path}: cannot be read ({error})") from error


class HubRows:
    """The rows of a data set that ``datasets`` loads, one after another."""

    unit = "rows"

    def __init__(self, name: str, configuration: str | None, split: str) -> None:
        self._asked = {"name": name, "configuration": configuration, "split": split}
        self._rows = _load(name, configuration, split)
        known = getattr(self._rows, "num_rows", None)
        self.size: int | None = known if isinstance(known, int) else None

    def identity(self) -> dict[str, Any]:
        """The name, configuration and split; of local files also names, sizes and times."""
        path = Path(str(self._asked["name"]))
        return {**self._asked, "files": _listing(path) if path.is_dir() else None}

    def read(self, place: Place) -> Iterator[Row]:
        """Rows from a place on."""
        start = place.offset
        behind = (
            self._rows.skip(start)
            if self.size is None
            else self._rows.select(range(start, self.size))
        )
        for number, row in enumerate(behind, start=start):
            yield Row(number, dict(row), Place(number + 1, number + 1))


def open_rows(data: str, configuration: str | None = None, split: str = "train") -> Rows:
    """The rows of a ``.jsonl`` file, or of a data set that ``datasets`` loads by name or path.

    Args:
        data: a file, a folder (of ``save_to_disk``, or of files), or a name.
        configuration: which of a data set's configurations.
        split: which of a data set's splits.

    Raises:
        InputError: there is nothing that can be read.
    """
    path = Path(data)
    if path.suffix in JSON_LINES or path.is_file():
        if path.suffix not in JSON_LINES:
            raise InputError(f"--data {data}: expected a file of {' or '.join(JSON_LINES)}")
        return JsonLines(path)
    return HubRows(data, configuration, split)


def _listing(folder: Path) -> str:
    """A digest of which files are in a folder; datasets may be too large to read twice."""
    hashed = blake2b(digest_size=16)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        about = path.stat()
        hashed.update(f"{path.relative_to(folder)}:{about.st_size}:{about.st_mtime_ns};".encode())
    return hashed.hexdigest()


def _load(name: str, configuration: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"--data {name}: no .jsonl file, and other data sets need the package datasets: "
            f"pip install datasets ({error})"
        ) from error
    try:
        if (Path(name) / "state.json").is_file():
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, configuration, split=split, streaming=True)
    except (OSError, ValueError, ConnectionError) as error:
        raise InputError(
            f"--data {name}: datasets cannot load it, split {split} ({error})"
        ) from error
