"""The hard batches hurt in every way that they should, and the judge tells right from wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from eagle3compat.suite import (
    MAX_MODEL_LEN,
    MISORDERED,
    RIGHT,
    TOKEN_BUDGET,
    WRONG,
    Call,
    CallOutcome,
    SuiteOutcome,
    hard_calls,
    judge,
    smoke_calls,
)


def test_the_calls_are_hard() -> None:
    calls = {call.name: call.prompts for call in hard_calls()}
    forty = calls["40 requests, of which 32 fit the batch"]
    assert len(forty) == 40
    assert sum(map(len, forty)) > 10 * TOKEN_BUDGET
    assert sum(len(prompt) == 1 for prompt in forty) >= 10
    prefixes = [prompt[:64] for prompt in forty if len(prompt) >= 64]
    assert max(map(prefixes.count, prefixes)) >= 6
    assert calls["the same call again"] == forty
    (longer,) = calls["one sequence longer than a step's budget"]
    assert TOKEN_BUDGET < len(longer) < MAX_MODEL_LEN
    assert len(calls["12 requests"]) == 12, "req_0_10 sorts before req_0_2"
    (longest,) = calls["the longest prompt there may be"]
    assert len(longest) == MAX_MODEL_LEN - 1


def test_prompts_of_a_call_are_told_apart_and_the_suite_is_always_the_same() -> None:
    for call in hard_calls():
        assert len(set(call.prompts)) == len(call.prompts), call.name
    assert hard_calls() == hard_calls()
    assert hard_calls(1) != hard_calls()
    assert set(smoke_calls()) < set(hard_calls())


CALL = Call("three", ((1,), (2, 3), (4,)))


def states(order: Sequence[int], layers: Sequence[int] = (2, 1, 0)) -> list[list[Any]]:
    """States of the prompts of CALL, distinct for each prompt and layer."""
    torch = pytest.importorskip("torch")
    rows = [len(prompt) for prompt in CALL.prompts]
    return [
        [torch.full((rows[prompt], 4), 10.0 * prompt + layer + 1) for layer in layers]
        for prompt in order
    ]


def verdict(found: list[list[Any]]) -> CallOutcome:
    return judge(CALL, found, states((0, 1, 2)))


def test_equal_states_are_right() -> None:
    assert verdict(states((0, 1, 2))) == CallOutcome("three", RIGHT, 0.0)


def test_states_of_other_prompts_are_misordered() -> None:
    outcome = verdict(states((2, 1, 0)))
    assert (outcome.result, outcome.detail) == (MISORDERED, "2 of 3 results are another prompt's")


def test_layers_in_another_order_are_misordered() -> None:
    outcome = verdict(states((0, 1, 2), layers=(0, 1, 2)))
    assert outcome.result == MISORDERED
    assert outcome.detail.startswith("layers in ascending order")


def test_a_row_of_another_token_is_wrong() -> None:
    found = states((0, 1, 2))
    found[1][0][1] += 0.5
    outcome = verdict(found)
    assert (outcome.result, outcome.detail) == (WRONG, "1 of 3 results are wrong")
    assert outcome.worst > 0.01


def test_missing_rows_layers_or_results_are_wrong() -> None:
    for found in (states((0, 1, 2)), states((0, 1)), states((0, 1, 2), layers=(2, 1))):
        if len(found) == 3 and len(found[0]) == 3:
            found[1][2] = found[1][2][:1]
        assert verdict(found).result == WRONG
        assert verdict(found).worst == math.inf


def suite_of(*results: str, control: float = 1.0) -> SuiteOutcome:
    calls = tuple(CallOutcome(result, result, 1e-5) for result in results)
    return SuiteOutcome(calls, control, (0,), (), {}, 1.0)


def test_a_suite_is_right_when_every_call_is_and_another_model_differs() -> None:
    assert suite_of(RIGHT, RIGHT).right
    assert not suite_of(RIGHT, WRONG).right
    assert not suite_of().right
    assert not suite_of(RIGHT, control=1e-5).right
