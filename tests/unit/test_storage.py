"""Sample files: readable by the trainer, whole or not there; and the folder they go to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from eagle3compat.errors import InputError
from eagle3compat.kimi.storage import (
    FILE_OVERHEAD,
    LAYER_OVERHEAD,
    ExtractionFolder,
    Shard,
    read_sample,
    sample_bytes,
    sample_path,
    save_sample,
    write_whole,
)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_has_no_name_that_the_trainer_reads_until_it_is_whole(tmp_path: Path) -> None:
    seen: list[str] = []

    def write(stream: BinaryIO) -> None:
        stream.write(b"half")
        seen.extend(names(tmp_path))

    write_whole(sample_path(tmp_path, 0), write)
    assert len(seen) == 1
    assert not seen[0].endswith("pt")
    assert names(tmp_path) == ["data_0.pt"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_whole(sample_path(tmp_path, 0), write)
    assert names(tmp_path) == []


def test_a_missing_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = ExtractionFolder(tmp_path / "a" / "b")
    folder.check()
    assert not folder.path.exists()
    folder.claim()
    assert folder.samples.is_dir()
    assert names(folder.samples) == []


def test_a_folder_with_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data_0.pt").write_text("precious")
    with pytest.raises(InputError, match=r"in use \(holds data_0\.pt\)"):
        ExtractionFolder(tmp_path).check()
    assert (tmp_path / "data_0.pt").read_text() == "precious"


def test_a_folder_of_an_extraction_is_gone_on_with_and_unfinished_files_are_taken_away(
    tmp_path: Path,
) -> None:
    folder = ExtractionFolder(tmp_path)
    folder.claim().close()
    sample_path(folder.samples, 0).touch()
    sample_path(folder.unfinished, 1).touch()
    folder.check()
    folder.claim()
    assert names(folder.samples) == ["data_0.pt"]
    assert names(folder.unfinished) == []


def test_two_runs_on_one_shard_are_refused_and_two_shards_are_not(tmp_path: Path) -> None:
    first = ExtractionFolder(tmp_path, Shard(0, 2)).claim()
    with pytest.raises(InputError, match=r"another run is extracting shard 0-of-2"):
        ExtractionFolder(tmp_path, Shard(0, 2)).claim()
    ExtractionFolder(tmp_path, Shard(1, 2)).claim()
    first.close()
    ExtractionFolder(tmp_path, Shard(0, 2)).claim()


def test_another_split_of_the_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest-0-of-2.jsonl").touch()
    ExtractionFolder(tmp_path, Shard(1, 2)).check()
    with pytest.raises(InputError, match="in 2 shards; expected 3"):
        ExtractionFolder(tmp_path, Shard(0, 3)).check()


def test_shards_have_every_sample_once() -> None:
    parts = [Shard(number, 3).indices(10) for number in range(3)]
    assert sorted(index for part in parts for index in part) == list(range(10))


def test_too_little_space_is_refused(tmp_path: Path) -> None:
    folder = ExtractionFolder(tmp_path / "new")
    folder.check_space(1)
    with pytest.raises(InputError, match="free there"):
        folder.check_space(1 << 60)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    for path in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(InputError, match="is a file"):
            ExtractionFolder(path).check()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for path in (tmp_path, tmp_path / "below"):
        with pytest.raises(InputError, match="cannot be written to"):
            ExtractionFolder(path).check()


def test_a_sample_comes_back_with_the_dtypes_that_the_trainer_expects(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    layers = [torch.randn(3, 4, dtype=torch.bfloat16) for _ in range(2)]
    path = sample_path(tmp_path, 7)
    size = save_sample(path, [5, 6, 7], [0, 1, 1], layers)
    sample = read_sample(path)
    assert size == path.stat().st_size
    assert sorted(sample) == ["hidden_states", "input_ids", "loss_mask"]
    assert sample["input_ids"].dtype == sample["loss_mask"].dtype == torch.int64
    assert sample["input_ids"].tolist() == [5, 6, 7]
    assert sample["loss_mask"].tolist() == [0, 1, 1]
    assert all(map(torch.equal, sample["hidden_states"], layers))


def test_the_bound_on_the_size_of_a_file_holds_and_is_near(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for tokens, layers in ((1, 1), (1000, 4), (3, 61)):
        states = [torch.ones(tokens, 8, dtype=torch.bfloat16) for _ in range(layers)]
        path = sample_path(tmp_path, tokens)
        size = save_sample(path, [1] * tokens, [1] * tokens, states)
        bound = sample_bytes(tokens, layers, 8, 2)
        assert size <= bound
        assert bound - size < FILE_OVERHEAD + LAYER_OVERHEAD * layers


def test_a_place_that_cannot_be_written_to_is_an_os_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(OSError, match="data_0"):
        save_sample(sample_path(tmp_path / "missing", 0), [1], [1], [])


def test_speculators_trainer_reads_the_samples(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    data = pytest.importorskip("speculators.train.data")
    layers = [torch.full((3, 4), float(layer)) for layer in range(4)]
    save_sample(sample_path(tmp_path, 0), [5, 6, 7], [0, 1, 1], layers)
    row = data.Eagle3SampleFileDataset(max_len=16, datapath=str(tmp_path))[0]
    assert row["input_ids"].tolist() == [6, 7]
    assert row["loss_mask"].tolist() == [1, 1]
    assert torch.equal(row["hidden_states"], torch.cat(layers[:3], dim=-1)[:2])
    assert torch.equal(row["verifier_last_hidden_states"], layers[3][:2])
