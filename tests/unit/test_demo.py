"""The demo asks for what a wrong extraction gets wrong, and can fail."""

from __future__ import annotations

from eagle3compat.commands.demo import (
    LAYERS,
    MAX_MODEL_LEN,
    TOKENS_A_STEP,
    comparison_table,
    demo_rows,
    verdict,
)
from eagle3compat.reference import Comparison


def comparison(*errors: float) -> Comparison:
    return Comparison((2, 5), (3,) * len(errors), tuple((0.0, error) for error in errors))


def test_the_rows_hurt_in_every_way_that_they_should() -> None:
    rows = demo_rows(plain_tokens=300)
    sequences = [row["input_ids"] for row in rows if "input_ids" in row]
    lengths = [len(sequence) for sequence in sequences]
    assert len(rows) > 32, "more requests than the generator schedules at once"
    assert max(lengths) > 2 * TOKENS_A_STEP, "a prompt that needs several steps"
    assert max(lengths) < MAX_MODEL_LEN
    assert lengths.count(1) > 2, "prompts of one token"
    prefixes = [tuple(sequence[:64]) for sequence in sequences if len(sequence) >= 64]
    assert max(map(prefixes.count, prefixes)) >= 4, "a shared prefix"
    assert list(LAYERS) == sorted(LAYERS, reverse=True), "layers in descending order"
    assert demo_rows(plain_tokens=300) == rows


def test_the_verdict_tells_differences_and_the_shims_that_were_off() -> None:
    assert verdict(comparison(1e-5, 1e-4), ()).startswith("equal: 2 samples x 2 layers")
    different = verdict(comparison(1e-5, 2e-4), ("cpu-rotary",))
    assert different.startswith("DIFFERENT")
    assert "largest relative error 2.0e-04" in different
    assert "turned off: cpu-rotary" in different


def test_the_table_has_a_row_a_sample_and_marks_what_is_beyond_the_tolerance() -> None:
    table = comparison_table(comparison(1e-5, 2e-4))
    assert table.row_count == 2
    assert list(table.columns[-1].cells) == ["1.0e-05 ", "2.0e-04!"]
