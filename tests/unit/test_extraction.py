"""Results are checked before they are written; the generator's config gets our values."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from eagle3compat.errors import Refusal
from eagle3compat.kimi.dataset import Sample
from eagle3compat.kimi.extraction import check_results, config_values

torch = pytest.importorskip("torch")

BATCH = [Sample(1, [5, 6, 7], [1, 1, 1]), Sample(3, [8], [1])]
LAYERS, WIDTH = 2, 4


def right_results() -> list[dict[str, Any]]:
    return [
        {
            "input_ids": torch.tensor(sample.input_ids),
            "hidden_states": [torch.ones(len(sample.input_ids), WIDTH) for _ in range(LAYERS)],
        }
        for sample in BATCH
    ]


def test_right_results_pass() -> None:
    check_results(BATCH, right_results(), LAYERS, WIDTH)


def lose_one(results: list[dict[str, Any]]) -> None:
    results.pop()


def swap(results: list[dict[str, Any]]) -> None:
    results.reverse()


def lose_a_layer(results: list[dict[str, Any]]) -> None:
    results[1]["hidden_states"].pop()


def lose_a_row(results: list[dict[str, Any]]) -> None:
    results[0]["hidden_states"][1] = torch.ones(2, WIDTH)


def make_nan(results: list[dict[str, Any]]) -> None:
    results[0]["hidden_states"][1][2, 3] = float("nan")


def make_infinite(results: list[dict[str, Any]]) -> None:
    results[1]["hidden_states"][0][0, 0] = float("inf")


def zero(results: list[dict[str, Any]]) -> None:
    results[0]["hidden_states"][0].zero_()


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lose_one, "found 1"),
        (swap, "another sequence"),
        (lose_a_layer, "2 layers for the sample of line 3"),
        (lose_a_row, r"\[2, 4\]"),
        (make_nan, "NaN or infinity"),
        (make_infinite, "NaN or infinity"),
        (zero, "zeros alone"),
    ],
)
def test_results_that_cannot_be_right_are_refused(spoil: Any, found: str) -> None:
    results = right_results()
    spoil(results)
    with pytest.raises(Refusal, match=found):
        check_results(BATCH, results, LAYERS, WIDTH)


def generator_module() -> ModuleType:
    module = ModuleType("generator")
    vars(module)["ModelConfig"] = lambda **options: SimpleNamespace(**options)
    return module


def test_config_values_override_those_of_the_call_site_and_leave_the_rest() -> None:
    module = generator_module()
    original = module.ModelConfig
    with config_values(module, {"ModelConfig": {"dtype": "float32"}}):
        config = module.ModelConfig(model="m", dtype="auto")
    assert (config.model, config.dtype) == ("m", "float32")
    assert module.ModelConfig is original


def test_config_values_are_gone_after_a_failure() -> None:
    module = generator_module()
    original = module.ModelConfig
    with pytest.raises(ZeroDivisionError), config_values(module, {"ModelConfig": {}}):
        raise ZeroDivisionError
    assert module.ModelConfig is original
