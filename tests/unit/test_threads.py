"""Work in threads: in order, a few ahead, each with torch's operations to itself."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from eagle3compat.kimi.threads import in_threads

torch = pytest.importorskip("torch")


def test_results_come_in_order_whichever_is_quicker() -> None:
    def work(number: int) -> int:
        time.sleep(0.02 if number % 3 == 0 else 0)
        return number

    assert list(in_threads(work, range(30), 4)) == list(range(30))


def test_items_are_taken_as_results_are() -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = in_threads(lambda number: number, items(), 3)
    assert [next(results) for _ in range(5)] == list(range(5))
    assert len(taken) <= 5 + 2 * 3 + 1
    results.close()


def test_torch_keeps_its_threads_outside() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert set(in_threads(lambda number: torch.get_num_threads(), range(8), 2)) == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_failure_is_raised_where_its_result_is_asked_for() -> None:
    def work(number: int) -> float:
        return 1 / (number - 2)

    results = in_threads(work, range(9), 2)
    assert [next(results), next(results)] == [-0.5, -1.0]
    with pytest.raises(ZeroDivisionError):
        next(results)
