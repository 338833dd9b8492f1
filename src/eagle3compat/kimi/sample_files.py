"""The sample files of a folder: their names, and reading many of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from eagle3compat.kimi.sample_scan import SampleScan, UnreadableSampleError, scan_sample
from eagle3compat.kimi.storage import sample_path

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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

    import torch

    threads = torch.get_num_threads()
    try:
        # torch's own threads would compete with ours for the cores.
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from _in_order(pool, scan, paths, 2 * workers)
    finally:
        torch.set_num_threads(threads)


def _in_order(
    pool: ThreadPoolExecutor, work: Callable[[_Item], _Result], items: Iterable[_Item], ahead: int
) -> Iterator[_Result]:
    waiting: deque[Future[_Result]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
