"""Preparing a data set: every row is accounted for, and a stopped run is gone on with."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle3compat
from eagle3compat.errors import InputError
from eagle3compat.kimi.dataset import SampleFile
from eagle3compat.kimi.frequencies import count_predicted, read_frequencies
from eagle3compat.kimi.preparation import Account, Progress, Request, prepare_data
from eagle3compat.kimi.row_preparer import (
    NO_CONVERSATION,
    NO_ROW,
    NOTHING_LEFT,
    TOO_LONG,
    RowSettings,
)
from eagle3compat.kimi.verifier import read_verifier

MAX_MODEL_LEN = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights and tokenizer: rows of token ids need neither."""
    folder = tmp_path_factory.mktemp("model")
    config = {"num_hidden_layers": 8, "hidden_size": 16, "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def row(*tokens: int, mask: list[int] | None = None) -> str:
    return json.dumps({"input_ids": tokens, "loss_mask": mask or [1] * len(tokens)})


def request(model: Path, data: Path, out: Path, **options: Any) -> Request:
    names = ("max_model_len", "truncate")
    settings = {name: options.pop(name) for name in names if name in options}
    rows = RowSettings(model, **{"max_model_len": MAX_MODEL_LEN, **settings})
    return Request(str(data), out, rows, **options)


def prepare(model: Path, folder: Path, *lines: str, **options: Any) -> Account:
    data = folder / "data.jsonl"
    data.write_text("\n".join(lines) + "\n")
    return prepare_data(request(model, data, folder / "out", **options), lambda _: None)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def remarks(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]


def test_samples_come_out_as_extract_reads_them(model: Path, tmp_path: Path) -> None:
    account = prepare(model, tmp_path, row(1, 2, 3, mask=[0, 1, 1]), "", row(4))
    samples = SampleFile(tmp_path / "out", read_verifier(model, needs_weights=False), MAX_MODEL_LEN)
    assert [(each.input_ids, each.loss_mask) for each in samples] == [
        ([1, 2, 3], [0, 1, 1]),
        ([4], [1]),
    ]
    sources = (tmp_path / "out" / "part-00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["source"] for line in sources] == [1, 3]
    assert account.tally.digest == samples.digest
    assert (account.tally.rows, account.tally.samples, account.tally.tokens) == (2, 2, 4)


def test_every_row_that_is_dropped_has_its_reason(model: Path, tmp_path: Path) -> None:
    account = prepare(
        model,
        tmp_path,
        row(1),
        "{",
        '{"text": "hello"}',
        '{"messages": []}',
        row(100),
        row(*range(9)),
        row(2),
    )
    assert account.tally.dropped == {NO_ROW: 1, NO_CONVERSATION: 3, TOO_LONG: 1}
    assert (account.tally.rows, account.tally.samples) == (7, 2)
    found = remarks(tmp_path / "out")
    assert [each["source"] for each in found] == [2, 3, 4, 5, 6]
    assert "malformed JSON" in found[0]["reason"]
    assert "found only text" in found[1]["reason"]
    assert "outside the vocabulary" in found[3]["reason"]
    assert "9 tokens" in found[4]["reason"]
    assert account.remarks == found


def test_long_samples_are_cut_only_when_asked_and_counted(model: Path, tmp_path: Path) -> None:
    long = row(*range(12), mask=[0] * 7 + [1] * 5)
    lost = row(*range(12), mask=[0] * 8 + [1] * 4)
    account = prepare(model, tmp_path, long, lost, row(1), truncate=True)
    (cut, _) = (tmp_path / "out" / "part-00000.jsonl").read_text().splitlines()
    assert json.loads(cut)["input_ids"] == list(range(8))
    assert json.loads(cut)["loss_mask"] == [0] * 7 + [1]
    assert (account.tally.cut, account.tally.dropped) == (1, {NOTHING_LEFT: 1})
    assert [(each["source"], each["what"]) for each in remarks(tmp_path / "out")] == [
        (1, "cut"),
        (2, "dropped"),
    ]


ROWS = [row(*range(1 + i % 8), mask=[i % 2] * (1 + i % 8)) for i in range(500)]
ROWS[70:70] = ["{", row(*range(20))]


def stop_after(calls: int, stop: Callable[[], None]) -> Callable[[Progress], None]:
    def advance(_: Progress) -> None:
        nonlocal calls
        calls -= 1
        if calls < 0:
            stop()

    return advance


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    prepare(model, folder, *ROWS, rows_a_part=64)
    return folder


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 7, 15])
def test_a_stopped_run_goes_on_to_the_same_bytes(
    model: Path, undisturbed: Path, tmp_path: Path, calls: int
) -> None:
    asked = request(model, undisturbed / "data.jsonl", tmp_path / "out", rows_a_part=64)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_data(asked, stop_after(calls, stop))
    with pytest.raises(InputError, match=r"without account\.json"):
        SampleFile(tmp_path / "out", read_verifier(model, needs_weights=False), MAX_MODEL_LEN)
    account = prepare_data(asked, lambda _: None)
    assert account.resumed == calls // 2
    assert contents(tmp_path / "out") == contents(undisturbed / "out")


KILLED = """
import os, signal, sys
from pathlib import Path
from eagle3compat.kimi.preparation import Request, prepare_data
from eagle3compat.kimi.row_preparer import RowSettings

model, data, out, calls = sys.argv[1:]
calls = int(calls)

def advance(_):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    rows = RowSettings(Path(model), 9)
    prepare_data(Request(data, Path(out), rows, rows_a_part=64, processes=2), advance)
"""


def test_a_killed_run_of_two_processes_goes_on_to_the_same_bytes(
    model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    arguments = [str(model), str(undisturbed / "data.jsonl"), str(tmp_path / "out")]
    path = str(Path(eagle3compat.__file__).resolve().parent.parent)

    def run(calls: int) -> int:
        return subprocess.run(
            [sys.executable, str(script), *arguments, str(calls)],
            env={**os.environ, "PYTHONPATH": path},
            timeout=120,
            check=False,
        ).returncode

    assert run(5) == -signal.SIGKILL
    assert not (tmp_path / "out" / "account.json").exists()
    assert run(0) == 0
    assert contents(tmp_path / "out") == contents(undisturbed / "out")


def test_a_finished_folder_is_not_made_again(model: Path, undisturbed: Path) -> None:
    before = contents(undisturbed / "out")
    asked = request(model, undisturbed / "data.jsonl", undisturbed / "out", rows_a_part=64)

    def fail(_: Progress) -> None:
        raise AssertionError

    account = prepare_data(asked, fail)
    assert (account.tally.rows, account.tally.samples) == (502, 500)
    assert contents(undisturbed / "out") == before


def test_a_folder_of_another_request_is_refused(model: Path, undisturbed: Path) -> None:
    data, out = undisturbed / "data.jsonl", undisturbed / "out"
    with pytest.raises(InputError, match=r"another request made .*max_model_len: 9, now 8"):
        prepare_data(request(model, data, out, rows_a_part=64, max_model_len=8), lambda _: None)


def test_a_folder_in_use_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(InputError, match=r"is in use \(holds notes\.txt"):
        prepare(model, tmp_path, row(1))
    (tmp_path / "out" / "notes.txt").unlink()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="another prepare is writing it"):
        prepare(model, tmp_path, row(1))
    os.close(descriptor)
    assert prepare(model, tmp_path, row(1)).tally.samples == 1


def test_a_data_set_of_which_nothing_is_left_is_refused_and_leaves_nothing(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"none of 2 rows makes a sample \(first: 1: malformed"):
        prepare(model, tmp_path, "{", row(*range(20)))
    assert contents(tmp_path / "out") == {}
    with pytest.raises(InputError, match="none of 0 rows"):
        prepare(model, tmp_path, "")


def test_memory_does_not_grow_with_the_data_set(model: Path, tmp_path: Path) -> None:
    def peak(rows: int, attempt: int) -> int:
        data = tmp_path / f"{rows}.jsonl"
        data.write_text(f"{row(*range(8))}\n" * rows)
        asked = request(model, data, tmp_path / f"out-{rows}-{attempt}", rows_a_part=100)
        gc.collect()
        tracemalloc.start()
        try:
            prepare_data(asked, lambda _: None)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(100, 0)  # imports count once
    # What other tests left behind is freed at any time, and counts then.
    small, large = (min(peak(rows, attempt) for attempt in range(3)) for rows in (2000, 8000))
    assert large < 1.05 * small


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=30))
def test_predicted_tokens_are_the_marked_ones_and_those_that_end_them(
    pairs: list[tuple[int, int]],
) -> None:
    input_ids, loss_mask = [token for token, _ in pairs], [marked for _, marked in pairs]
    expected: Counter[int] = Counter()
    for position, (token, marked) in enumerate(pairs):
        after_marked = position > 0 and loss_mask[position - 1] == 1
        if marked or after_marked:
            expected[token] += 1
    assert count_predicted(input_ids, loss_mask) == expected


def test_frequencies_say_which_samples_they_count(model: Path, tmp_path: Path) -> None:
    account = prepare(model, tmp_path, row(1, 2, 3, 4, mask=[0, 1, 1, 0]), row(2, mask=[1]))
    path = tmp_path / "out" / "token_frequencies.json"
    frequencies = read_frequencies(path, account.tally.digest)
    assert frequencies.counts == {2: 2, 3: 1, 4: 1}
    assert frequencies.vocab_size == 100
    with pytest.raises(InputError, match="another data set"):
        read_frequencies(path, "0" * 32)
    path.write_text("{}")
    with pytest.raises(InputError, match="expected token frequencies"):
        read_frequencies(path)


def test_what_datasets_loads_is_read_row_by_row_from_any_place(model: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [i % 100, 1], "loss_mask": [0, 1]} for i in range(150)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "disk"))
    (tmp_path / "files").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "files" / "train.parquet"))
    for name in ("disk", "files"):
        out = tmp_path / f"out-{name}"
        asked = request(model, tmp_path / name, out, rows_a_part=64)

        def stop() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare_data(asked, stop_after(3, stop))
        account = prepare_data(asked, lambda _: None)
        assert (account.resumed, account.tally.samples) == (1, 150)
        lines = [
            json.loads(line)
            for part in sorted(out.glob("part-*.jsonl"))
            for line in part.read_text().splitlines()
        ]
        assert [line["source"] for line in lines] == list(range(150))
        assert [line["input_ids"] for line in lines] == [each["input_ids"] for each in rows]
    with pytest.raises(InputError, match="datasets cannot load it"):
        prepare_data(request(model, tmp_path / "none", tmp_path / "out"), lambda _: None)
