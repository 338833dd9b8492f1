"""Rows become files beside the forward pass: whole prompts, in the order of their tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from eagle3compat.errors import Refusal
from eagle3compat.kimi.exchange import Announced, Written
from eagle3compat.kimi.manifest import layer_checksum
from eagle3compat.kimi.storage import read_sample, sample_path
from eagle3compat.shims.request_order import Chunk

torch = pytest.importorskip("torch")
state_writer = pytest.importorskip("eagle3compat.kimi.state_writer")

LAYERS, WIDTH, STEP = 3, 4, 16


def states_of(request: int, length: int, dtype: Any = None) -> list[Any]:
    """What each layer gives for a prompt, [length, WIDTH]."""
    values = torch.arange(length * WIDTH).view(length, WIDTH)
    layers = (values + 1000 * request + 100 * layer for layer in range(LAYERS))
    return [layer.to(dtype or torch.float32) for layer in layers]


def tokens_of(request: int, length: int) -> tuple[int, ...]:
    return tuple(range(request, request + length))


class Steps:
    """Feeds a writer as a worker does."""

    def __init__(self, folder: Path, *, slabs: int = 2, dtype: Any = torch.float32) -> None:
        self.folder = folder
        self.dtype = dtype
        self.writer = state_writer.StateWriter(
            unfinished=folder,
            layers=LAYERS,
            hidden_size=WIDTH,
            dtype=dtype,
            device=torch.device("cpu"),
            threads=2,
            cores=sorted(os.sched_getaffinity(0)),
            slabs=slabs,
            tokens_a_step=STEP,
            last_layer=LAYERS - 1,
        )

    def announce(self, lengths: dict[int, int]) -> None:
        self.writer.announce(
            [Announced(f"r{each}", each, bytes(length)) for each, length in lengths.items()]
        )

    def step(self, *parts: tuple[int, int, int, int], padding: int = 0) -> None:
        """One step of parts (request, start, end, length)."""
        chunks = [
            Chunk(f"r{request}", start, tokens_of(request, length)[start:end], length)
            for request, start, end, length in parts
        ]
        rows = [
            [layer[start:end] for layer in states_of(request, length, self.dtype)]
            for request, start, end, length in parts
        ]
        pad = torch.full((padding, WIDTH), float("nan")).to(self.dtype)
        self.writer.take(chunks, [torch.cat([*layer, pad]) for layer in zip(*rows, strict=True)])

    def written(self, count: int) -> list[Written]:
        found: list[Written] = []
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            written, failure = self.writer.collect()
            assert failure is None
            found += written
            if len(found) >= count:
                break
            time.sleep(0.001)
        return found


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    steps = Steps(tmp_path)
    yield steps
    steps.writer.close()


def check_file(folder: Path, request: int, length: int, dtype: Any = None) -> None:
    sample = read_sample(sample_path(folder, request))
    assert sample["input_ids"].tolist() == list(tokens_of(request, length))
    assert all(map(torch.equal, sample["hidden_states"], states_of(request, length, dtype)))


def test_whole_prompts_of_a_step_are_written_without_its_padding(steps: Steps) -> None:
    steps.announce({1: 5, 2: 1, 3: 7})
    steps.step((1, 0, 5, 5), (2, 0, 1, 1), (3, 0, 7, 7), padding=3)
    assert {each.index for each in steps.written(3)} == {1, 2, 3}
    for request, length in ((1, 5), (2, 1), (3, 7)):
        check_file(steps.folder, request, length)


def test_a_prompt_over_more_steps_than_there_are_slabs_is_joined(steps: Steps) -> None:
    steps.announce({1: 50, 2: 3})
    for start in range(0, 48, 8):
        steps.step((1, start, start + 8, 50))
    steps.step((1, 48, 50, 50), (2, 0, 3, 3))
    assert len(steps.written(2)) == 2
    check_file(steps.folder, 1, 50)
    check_file(steps.folder, 2, 3)


def test_a_preempted_prompt_starts_again(steps: Steps) -> None:
    steps.announce({1: 10})
    steps.step((1, 0, 6, 10))
    steps.step((1, 0, 4, 10))
    steps.step((1, 4, 10, 10))
    assert [each.tokens for each in steps.written(1)] == [10]
    check_file(steps.folder, 1, 10)


def test_requests_that_were_not_announced_are_passed_over(steps: Steps) -> None:
    steps.announce({2: 3})
    steps.step((1, 0, 4, 4), (2, 0, 3, 3))
    assert [each.index for each in steps.written(1)] == [2]
    check_file(steps.folder, 2, 3)


def test_rows_that_do_not_follow_are_refused(steps: Steps) -> None:
    steps.announce({1: 10})
    steps.step((1, 0, 4, 10))
    with pytest.raises(Refusal, match="from position 4 on; found rows from position 5 on"):
        steps.step((1, 5, 10, 10))


def test_too_few_rows_are_refused(steps: Steps) -> None:
    steps.announce({1: 4})
    chunk = Chunk("r1", 0, tokens_of(1, 4), 4)
    with pytest.raises(Refusal, match="expected 4 rows of this step; found 3"):
        steps.writer.take([chunk], [layer[:3] for layer in states_of(1, 4)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_checksums_norms_and_last_states_are_those_of_the_file(tmp_path: Path, dtype: Any) -> None:
    steps = Steps(tmp_path, dtype=dtype)
    steps.announce({1: 6})
    steps.step((1, 0, 4, 6))
    steps.step((1, 4, 6, 6))
    (written,) = steps.written(1)
    layers = read_sample(sample_path(tmp_path, 1))["hidden_states"]
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for layer, checksum, norm in zip(layers, written.checksums, written.layer_norms, strict=True):
        sums = layer.view(bits).sum(-1, dtype=torch.int64)
        assert checksum == layer_checksum(sums.numpy().tobytes())
        assert norm == pytest.approx(float(layer.float().norm(dim=-1).mean()), rel=1e-5)
    assert torch.equal(steps.writer.last_states(["r1"]), layers[-1][-1:])
    steps.writer.close()


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (float("nan"), "not finite in its layer 2 of 3"),
        (float("inf"), "not finite in its layer 2 of 3"),
        (0.0, "nothing but zeros in its layer 2 of 3"),
    ],
)
def test_a_fault_is_told_and_the_file_is_there_to_look_at(
    steps: Steps, value: float, fault: str
) -> None:
    steps.announce({1: 3})
    states = states_of(1, 3)
    rows = slice(0, 3) if value == 0 else slice(1, 2)
    states[1][rows] = value
    steps.writer.take([Chunk("r1", 0, tokens_of(1, 3), 3)], states)
    (written,) = steps.written(1)
    assert fault in str(written.fault)
    assert sample_path(steps.folder, 1).exists()


def test_a_place_that_cannot_be_written_to_is_a_failure_that_ends_nothing_else(
    tmp_path: Path,
) -> None:
    steps = Steps(tmp_path / "missing")
    steps.announce({1: 3, 2: 3})
    steps.step((1, 0, 3, 3))
    steps.writer.close()
    written, failure = steps.writer.collect()
    assert written == []
    assert "data_1" in str(failure)
    steps.step((2, 0, 3, 3))  # passed over: the parent ends the run


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_a_failure_that_says_so(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    sample_path(tmp_path, 1).symlink_to("/dev/full")
    steps.announce({1: 3})
    steps.step((1, 0, 3, 3))
    steps.writer.close()
    written, failure = steps.writer.collect()
    assert written == []
    assert "data_1.pt" in str(failure)
    assert "bytes are free on its disk" in str(failure)


def test_any_order_of_steps_gives_the_same_files(tmp_path: Path) -> None:
    random = Random(3)
    steps = Steps(tmp_path, slabs=1)
    lengths = {request: random.randint(1, 40) for request in range(40)}
    steps.announce(lengths)
    position = dict.fromkeys(lengths, 0)
    while position:
        parts, room = [], STEP
        for request in random.sample(sorted(position), min(3, len(position))):
            end = min(lengths[request], position[request] + random.randint(1, 7))
            if end - position[request] <= room:
                parts.append((request, position[request], end, lengths[request]))
                room -= end - position[request]
                position[request] = end
        steps.step(*parts)
        position = {each: at for each, at in position.items() if at < lengths[each]}
    assert len(steps.written(40)) == 40
    for request, length in lengths.items():
        check_file(tmp_path, request, length)
    steps.writer.close()
