"""Which samples share a step is decided by the data set alone."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from eagle3compat.kimi.streaming import in_groups


@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.integers(1, 50),
    st.integers(1, 8),
)
def test_groups_hold_every_sample_once_in_order_and_fit_a_step(
    lengths: list[int], tokens: int, sequences: int
) -> None:
    groups = list(in_groups(range(len(lengths)), lengths, tokens, sequences))
    assert [index for group in groups for index in group] == list(range(len(lengths)))
    for group in groups:
        assert 0 < len(group) <= sequences
        assert len(group) == 1 or sum(lengths[index] for index in group) <= tokens


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_a_group_is_closed_only_where_the_next_sample_does_not_fit(lengths: list[int]) -> None:
    groups = list(in_groups(range(len(lengths)), lengths, 20, 4))
    for group, following in itertools.pairwise(groups):
        filled = sum(lengths[index] for index in group) + lengths[following[0]]
        assert filled > 20 or len(group) == 4
