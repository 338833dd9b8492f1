"""The sample files of a folder: their names, and reading many of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from eagle3compat.kimi.sample_scan import SampleScan, UnreadableSampleError, scan_sample
from eagle3compat.kimi.storage import sample_path
from eagle3compat.kimi.threads import in_threads


def sample_number(path: Path) -> int | None:
    """The number in the name of a sample file, or None for another name."""
    digits = path.name.removeprefix("data_").removesuffix(".pt")
    if not digits.isdecimal() or path.name != sample_path(Path(), int(digits)).name:
        return None
    return int(digits)


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder, by name; none where it is missing."""
    return iter(sorted(path for path in folder.rglob("*") if not path.is_dir()))


def scan_all(
    paths: Iterable[Path], workers: int, *, archives: bool = False
) -> Iterator[SampleScan | UnreadableSampleError]:
    """Scan files in several threads; what comes back is in their order, a few ahead at most.

    Args:
        paths: of sample files.
        workers: how many are read at the same time.
        archives: whether the archives' own checksums are checked too.
    """

    def scan(path: Path) -> SampleScan | UnreadableSampleError:
        try:
            return scan_sample(path, archive=archives)
        except UnreadableSampleError as error:
            return error

    return in_threads(scan, paths, workers)
