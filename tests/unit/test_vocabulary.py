"""The draft's vocabulary: names that no trainer takes for a sample, and no use for other data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.errors import InputError
from eagle3compat.kimi import vocabulary as vocabularies
from eagle3compat.kimi.manifest import input_digest
from eagle3compat.kimi.verifier import Verifier
from eagle3compat.kimi.vocabulary import (
    DEFAULT_SIZE,
    Vocabulary,
    count_rows,
    file_stem,
    make_vocabulary,
    settle_size,
)

DIGEST = "0123456789abcdef" * 2


def verifier(vocab_size: int = 100) -> Verifier:
    return Verifier(
        path=Path("model"),
        num_hidden_layers=8,
        hidden_size=4,
        vocab_size=vocab_size,
        max_position_embeddings=None,
        rope_scaled=False,
        dtype=None,
        scales_experts=False,
    )


def record(size: int = 4, occurring: int = 3, covered: int = 9) -> Vocabulary:
    return Vocabulary(size, 100, DIGEST, "0.3.0", occurring, 10, covered, "", "")


def test_the_files_names_tell_size_and_data_and_are_no_samples() -> None:
    made = record()
    names = [path(Path()).name for path in (made.d2t_path, made.t2d_path, made.summary_path)]
    assert names == [
        "d2t-4-0123456789ab.npy",
        "t2d-4-0123456789ab.npy",
        "vocabulary-4-0123456789ab.json",
    ]
    assert not any(name.endswith("pt") for name in names), "0.3.0 reads such a file as a sample"
    assert file_stem("d2t", 5, DIGEST) != file_stem("d2t", 4, DIGEST)
    assert file_stem("d2t", 4, DIGEST[::-1]) != file_stem("d2t", 4, DIGEST)


def test_coverage_and_filling_are_told() -> None:
    assert record(size=4, occurring=3, covered=9).coverage == 0.9
    assert record(size=4, occurring=3).filled == 1
    assert record(size=4, occurring=7).filled == 0


@pytest.mark.parametrize(
    ("asked", "vocab_size", "expected"),
    [(None, 100, 100), (None, 163_840, DEFAULT_SIZE), (100, 100, 100), (1, 100, 1)],
)
def test_the_size_is_what_was_asked_for_or_as_much_as_usual(
    asked: int | None, vocab_size: int, expected: int
) -> None:
    assert settle_size(asked, verifier(vocab_size)) == expected


@pytest.mark.parametrize("asked", [0, -1, 101])
def test_a_size_that_the_verifier_cannot_have_is_refused(asked: int) -> None:
    with pytest.raises(InputError, match=f"--draft-vocab-size {asked}: expected 1 to 100"):
        settle_size(asked, verifier())


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = (
    {"input_ids": [1, 2, 2, 3], "loss_mask": [0, 1, 1, 1]},
    {"input_ids": [3, 9], "loss_mask": [1, 0]},
)


def test_tokens_to_be_predicted_and_ends_of_turns_are_counted(
    tmp_path: Path,
) -> None:
    counts, digest = count_rows(write_rows(tmp_path / "data.jsonl", *ROWS), verifier())
    assert counts == {2: 2, 3: 2, 9: 1}
    again, same = count_rows(write_rows(tmp_path / "other.jsonl", *ROWS[::-1]), verifier())
    assert (again, same) == (counts, digest), "the order of the rows is no matter"
    _, other = count_rows(write_rows(tmp_path / "less.jsonl", ROWS[0]), verifier())
    assert other == input_digest([1, 2, 2, 3], [0, 1, 1, 1]) != digest


def test_rows_without_a_mask_are_refused(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", ROWS[0], {"input_ids": [1]})
    with pytest.raises(InputError, match="1 rows have no loss_mask"):
        count_rows(data, verifier())


@pytest.mark.parametrize(
    ("counts", "fault"),
    [({}, "every loss mask is all zeros"), ({100: 1}, "token id 100"), ({-1: 2}, "token id -1")],
)
def test_counts_of_nothing_or_of_another_verifier_are_refused(
    tmp_path: Path, counts: dict[int, int], fault: str
) -> None:
    with pytest.raises(InputError, match=fault):
        make_vocabulary(tmp_path, counts, DIGEST, 4, 100)


# --- with speculators' function ------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Calls of speculators' function, which is there in its own words or does not run here."""
    pytest.importorskip("torch")
    pytest.importorskip("speculators", exc_type=ImportError)
    from speculators.train import vocab_mapping

    seen: list[tuple[int, int]] = []
    own = vocab_mapping.build_vocab_mappings_from_distribution

    def build(counts: dict[int, int], size: int, target_size: int) -> Any:
        seen.append((size, target_size))
        return own(counts, size, target_size)

    monkeypatch.setattr(vocab_mapping, "build_vocab_mappings_from_distribution", build)
    return seen


COUNTS = {7: 5, 90: 3, 8: 3, 20: 1}


def test_the_most_frequent_tokens_are_taken(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    made = make_vocabulary(tmp_path, COUNTS, DIGEST, 3, 100)
    d2t, t2d = vocabularies.load_arrays(tmp_path, made)
    assert (d2t.dtype, t2d.dtype) == (sys.modules["torch"].int64, sys.modules["torch"].bool)
    assert [index + int(offset) for index, offset in enumerate(d2t)] == [7, 8, 90]
    assert t2d.nonzero().flatten().tolist() == [7, 8, 90]
    assert (made.covered, made.predicted, made.occurring, made.filled) == (11, 12, 4, 0)
    assert calls == [(3, 100)]


def test_a_size_above_what_occurs_is_filled_with_the_lowest_ids(
    tmp_path: Path, calls: list[tuple[int, int]]
) -> None:
    made = make_vocabulary(tmp_path, COUNTS, DIGEST, 6, 100)
    _, t2d = vocabularies.load_arrays(tmp_path, made)
    assert t2d.nonzero().flatten().tolist() == [0, 1, 7, 8, 20, 90]
    assert (made.filled, made.coverage) == (2, 1.0)


def test_whole_files_are_taken_again_and_others_made_anew(
    tmp_path: Path, calls: list[tuple[int, int]]
) -> None:
    first = make_vocabulary(tmp_path, COUNTS, DIGEST, 3, 100)
    assert make_vocabulary(tmp_path, COUNTS, DIGEST, 3, 100) == first
    assert len(calls) == 1
    make_vocabulary(tmp_path, COUNTS, DIGEST, 2, 100)
    make_vocabulary(tmp_path, COUNTS, DIGEST[::-1], 3, 100)
    make_vocabulary(tmp_path, COUNTS, DIGEST, 3, 200)
    assert len(calls) == 4


@pytest.mark.parametrize("damage", ["cut", "other", "no JSON"])
def test_damaged_files_are_made_anew(
    tmp_path: Path, calls: list[tuple[int, int]], damage: str
) -> None:
    made = make_vocabulary(tmp_path, COUNTS, DIGEST, 3, 100)
    path = made.d2t_path(tmp_path)
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[:-3])
    elif damage == "other":
        path.write_bytes(whole[:-1] + b"\x01")
    else:
        made.summary_path(tmp_path).write_text("{")
    assert make_vocabulary(tmp_path, COUNTS, DIGEST, 3, 100) == made
    assert path.read_bytes() == whole
    assert len(calls) == 2
