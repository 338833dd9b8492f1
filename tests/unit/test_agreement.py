"""What rounding explains between two extractions of one sample, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from extraction_folders import TEXTS

from eagle3compat.kimi.agreement import compare_rows, rounding_bound
from eagle3compat.reference import ReferenceModel
from eagle3compat.tiny import Variant, write_tiny_kimi

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

LAYERS = tuple(range(8))


def states(reference: ReferenceModel, dtype: Any) -> list[list[Any]]:
    for parameter in reference.model.parameters():
        parameter.data = parameter.data.to(dtype)
    return reference.hidden_states(TEXTS[:4], LAYERS)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "yarn"])
def both(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """The same weights by transformers in bfloat16 and in float32, each rounded at the end."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("agreement") / "tiny"
    write_tiny_kimi(folder, variant=Variant(yarn=request.param))
    exact = states(ReferenceModel.load(folder), torch.float32)
    rounded = states(ReferenceModel.load(folder), torch.bfloat16)
    return rounded, [[layer.to(torch.bfloat16) for layer in sample] for sample in exact]


def test_all_that_bfloat16_rounds_is_explained(both: Any) -> None:
    """Two extractions in bfloat16 differ by less than one of them does from the exact states."""
    worst = {}
    for sample, exact in zip(*both, strict=True):
        for layer, (found, expected) in enumerate(zip(sample, exact, strict=True)):
            agreement = compare_rows(found, expected, layer)
            assert agreement.holds, (layer, agreement)
            worst[layer] = max(worst.get(layer, 0.0), agreement.worst / agreement.bound)
    # It is a bound that is used, not one that anything keeps.
    assert all(0.05 < ratio <= 1 for ratio in worst.values()), worst


def test_rows_of_another_place_are_never_explained(both: Any) -> None:
    for sample, exact in zip(*both, strict=True):
        for layer in LAYERS:
            found = sample[layer].clone()
            found[[3, 9]] = found[[9, 3]]
            agreement = compare_rows(found, exact[layer], layer)
            assert not agreement.holds
            assert {3, 9} <= set(agreement.faulty_rows)


def test_states_of_another_layer_are_never_explained(both: Any) -> None:
    sample, exact = both[0][0], both[1][0]
    for layer in LAYERS[1:]:
        assert not compare_rows(sample[layer - 1], exact[layer], layer).holds


def test_one_wrong_row_is_enough() -> None:
    expected = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for value in (0.0, float("nan"), float("inf")):
        found = expected.clone()
        found[7] = value
        agreement = compare_rows(found, expected, 60)
        assert not agreement.holds
        assert agreement.faulty_rows == (7,)


def test_a_row_that_was_routed_elsewhere_is_explained_and_many_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(40, 64, generator=generator)
    noise = 0.3 * torch.randn(40, 64, generator=generator)
    for rows, holds in ((4, True), (5, False)):
        found = expected.clone()
        found[:rows] += noise[:rows]
        agreement = compare_rows(found.bfloat16(), expected.bfloat16(), 7)
        assert len(agreement.beyond) == rows
        assert agreement.holds is holds


def test_float32_is_held_to_its_tolerance_in_every_row() -> None:
    expected = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    found = expected.clone()
    found[3] *= 1 + 5e-5
    assert compare_rows(found, expected, 7).holds
    found[3] *= 1 + 2e-4
    agreement = compare_rows(found, expected, 7)
    assert not agreement.holds
    assert agreement.faulty_rows == (3,)


def test_the_bound_grows_with_depth_and_shrinks_with_precision() -> None:
    shallow, deep = rounding_bound(torch.bfloat16, 2), rounding_bound(torch.bfloat16, 60)
    assert shallow < deep < 0.25
    assert rounding_bound(torch.float16, 60) == deep / 8
    assert rounding_bound(torch.float32, 60) == 1e-4


def test_rows_of_zeros_agree_with_zeros_alone() -> None:
    zeros = torch.zeros(2, 8)
    assert compare_rows(zeros, zeros, 0).holds
    assert not compare_rows(torch.ones(2, 8), zeros, 0).holds


def test_equal_rows_are_not_taken_for_each_other(tmp_path: Path) -> None:
    row = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = row.repeat(12, 1)
    assert compare_rows(rows * 1.001, rows, 7).holds
