"""Work spread over threads of ours, each of which runs torch's operations alone.

torch's own threads meet after every operation: with small blocks, and beside other work on the
machine, they mostly wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(
    work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int
) -> Iterator[_Result]:
    """The results of ``work`` on each item, in the items' order; a few ahead at most.

    Args:
        work: called from several threads at once.
        items: taken as results are.
        threads: how many.
    """
    import torch

    before = torch.get_num_threads()
    waiting: deque[Future[_Result]] = deque()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(before)
