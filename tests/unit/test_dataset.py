"""Reading rows of token ids: nothing is cut, dropped or guessed."""

from __future__ import annotations

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3compat.errors import InputError
from eagle3compat.kimi.dataset import Sample, SampleFile, combined_digest
from eagle3compat.kimi.manifest import input_digest
from eagle3compat.kimi.verifier import Verifier

VERIFIER = Verifier(Path("model"), 8, 16, 100, None, False, None, False)
MAX_MODEL_LEN = 9


def read(folder: Path, *lines: str) -> list[Sample]:
    data = folder / "data.jsonl"
    data.write_text("\n".join(lines))
    return list(SampleFile(data, VERIFIER, MAX_MODEL_LEN))


def refuse(folder: Path, *lines: str) -> str:
    with pytest.raises(InputError) as refusal:
        read(folder, *lines)
    return str(refusal.value)


GOOD = '{"input_ids": [1, 2]}'


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 99), st.integers(0, 1)),
            min_size=1,
            max_size=MAX_MODEL_LEN - 1,
        ),
        min_size=1,
        max_size=20,
    )
)
def test_rows_come_back_as_they_were_and_in_order(rows: list[list[tuple[int, int]]]) -> None:
    lines = [
        json.dumps({"input_ids": [token for token, _ in row], "loss_mask": [m for _, m in row]})
        for row in rows
    ]
    with TemporaryDirectory() as folder:
        samples = read(Path(folder), *lines)
    assert [
        list(zip(sample.input_ids, sample.loss_mask, strict=True)) for sample in samples
    ] == rows
    assert [sample.line for sample in samples] == list(range(1, len(rows) + 1))


def test_without_a_mask_every_token_counts_and_the_sample_says_so(tmp_path: Path) -> None:
    masked, unmasked = read(tmp_path, '{"input_ids": [5], "loss_mask": [false]}', GOOD)
    assert (masked.loss_mask, masked.mask_given) == ([0], True)
    assert (unmasked.loss_mask, unmasked.mask_given) == ([1, 1], False)


def test_blank_lines_are_passed_over_but_counted(tmp_path: Path) -> None:
    assert [sample.line for sample in read(tmp_path, "", GOOD, "  ", GOOD)] == [2, 4]


def test_the_longest_sequence_leaves_room_for_the_sampled_token(tmp_path: Path) -> None:
    assert len(read(tmp_path, json.dumps({"input_ids": [1] * 8}))[0].input_ids) == 8
    message = refuse(tmp_path, GOOD, json.dumps({"input_ids": [1] * 9}))
    assert "data.jsonl:2: 9 tokens" in message
    assert "raise it to 10" in message


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("{", "malformed JSON"),
        ("[1, 2]", "expected a JSON object"),
        ("{}", "found only nothing"),
        ('{"text": "hello"}', "found only text"),
        ('{"input_ids": [1], "messages": []}', "found input_ids and messages"),
        ('{"input_ids": []}', "empty sequence"),
        ('{"input_ids": "12"}', "no list of integers"),
        ('{"input_ids": [1.0]}', "no list of integers"),
        ('{"input_ids": [true]}', "no list of integers"),
        ('{"input_ids": [[1]]}', "no list of integers"),
        ('{"input_ids": [100]}', "token id 100 is outside the vocabulary"),
        ('{"input_ids": [1, -1]}', "token id -1 is outside the vocabulary"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "loss_mask has 1 entries for 2 input_ids"),
        ('{"input_ids": [1], "loss_mask": [2]}', "no list of 0 and 1"),
        ('{"input_ids": [1], "loss_mask": "1"}', "no list of 0 and 1"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: str, fault: str) -> None:
    message = refuse(tmp_path, GOOD, row)
    assert "data.jsonl:2: " in message
    assert fault in message


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    assert "holds no rows" in refuse(tmp_path, "", " ")


def test_a_file_that_is_missing_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        SampleFile(tmp_path / "none.jsonl", VERIFIER, MAX_MODEL_LEN)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        SampleFile(tmp_path / "binary", VERIFIER, MAX_MODEL_LEN)


def write_rows(path: Path, rows: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def test_samples_are_read_when_asked_for_in_any_order(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4], [5, 6]]
    samples = SampleFile(write_rows(tmp_path / "data.jsonl", rows), VERIFIER, MAX_MODEL_LEN)
    assert [samples[i].input_ids for i in (2, 0, 1, -1)] == [rows[2], rows[0], rows[1], rows[2]]
    assert [sample.line for sample in samples[1:]] == [2, 3]
    assert (len(samples), samples.tokens, samples.unmasked) == (3, 6, 3)
    assert list(samples.token_counts) == [3, 1, 2]
    with pytest.raises(IndexError):
        samples[3]


def test_threads_may_ask_for_samples_at_once(tmp_path: Path) -> None:
    rows = [[i % 100] * (i % 8 + 1) for i in range(400)]
    samples = SampleFile(write_rows(tmp_path / "data.jsonl", rows), VERIFIER, MAX_MODEL_LEN)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda i: samples[i].input_ids, range(len(rows)))
    assert list(found) == rows


def test_memory_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    def peak(tokens_a_row: int) -> int:
        data = write_rows(tmp_path / f"{tokens_a_row}.jsonl", [[7] * tokens_a_row] * 500)
        tracemalloc.start()
        samples = SampleFile(data, VERIFIER, 5000)
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            assert len(samples) == 500

    # 2 million tokens would take 16 MB in a list of lists alone.
    assert peak(4000) < 1_000_000


def test_the_digest_tells_data_sets_apart_but_not_their_order(tmp_path: Path) -> None:
    def digest(*rows: list[int]) -> str:
        return SampleFile(
            write_rows(tmp_path / "data.jsonl", list(rows)), VERIFIER, MAX_MODEL_LEN
        ).digest

    assert digest([1, 2], [3]) == digest([3], [1, 2])
    assert len({digest([1, 2], [3]), digest([1], [2, 3]), digest([1, 2]), digest([3, 3])}) == 4
    parts = [combined_digest([input_digest(row, [1] * len(row))]) for row in ([1, 2], [3])]
    assert digest([1, 2], [3]) == combined_digest(parts)


def test_a_row_that_changes_after_the_check_is_refused(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [[1, 2], [3, 4]])
    samples = SampleFile(data, VERIFIER, MAX_MODEL_LEN)
    data.write_text(data.read_text().replace("[3, 4]", "[3]   "))
    assert samples[0].input_ids == [1, 2]
    with pytest.raises(InputError, match=r"data\.jsonl:2: the row changed"):
        samples[1]


def test_a_prepared_folder_is_read_part_by_part_once_it_is_finished(tmp_path: Path) -> None:
    write_rows(tmp_path / "part-00001.jsonl", [[3]])
    write_rows(tmp_path / "part-00000.jsonl", [[1], [2]])
    with pytest.raises(InputError, match=r"without account\.json"):
        SampleFile(tmp_path, VERIFIER, MAX_MODEL_LEN)
    (tmp_path / "account.json").write_text("{}")
    samples = SampleFile(tmp_path, VERIFIER, MAX_MODEL_LEN)
    assert [(sample.line, sample.input_ids) for sample in samples] == [
        (1, [1]),
        (2, [2]),
        (1, [3]),
    ]
