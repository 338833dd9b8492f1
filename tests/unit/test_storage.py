"""Sample files: readable by the trainer, whole or not there; and the folder they go to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from eagle3compat.errors import InputError
from eagle3compat.kimi.storage import (
    claim_output_folder,
    read_sample,
    sample_path,
    write_sample,
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
    claim_output_folder(tmp_path / "a" / "b")
    claim_output_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data_0.pt").write_text("precious")
    with pytest.raises(InputError, match=r"in use \(holds data_0\.pt\)"):
        claim_output_folder(tmp_path)
    assert (tmp_path / "data_0.pt").read_text() == "precious"


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(InputError, match="is a file"):
        claim_output_folder(tmp_path / "out")
    with pytest.raises(InputError, match="cannot be used"):
        claim_output_folder(tmp_path / "out" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot be written to"):
        claim_output_folder(tmp_path)
    with pytest.raises(InputError, match="cannot be used"):
        claim_output_folder(tmp_path / "below")


def test_a_sample_comes_back_with_the_dtypes_that_the_trainer_expects(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    layers = [torch.randn(3, 4, dtype=torch.bfloat16) for _ in range(2)]
    path = sample_path(tmp_path, 7)
    size = write_sample(path, [5, 6, 7], [0, 1, 1], layers)
    sample = read_sample(path)
    assert size == path.stat().st_size
    assert sorted(sample) == ["hidden_states", "input_ids", "loss_mask"]
    assert sample["input_ids"].dtype == sample["loss_mask"].dtype == torch.int64
    assert sample["input_ids"].tolist() == [5, 6, 7]
    assert sample["loss_mask"].tolist() == [0, 1, 1]
    assert all(map(torch.equal, sample["hidden_states"], layers))


def test_a_view_is_stored_without_the_tensor_that_it_looks_into(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.ones(100_000, 4)
    assert write_sample(sample_path(tmp_path, 0), [1], [1], [whole[:1]]) < 10_000


def test_speculators_trainer_reads_the_samples(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    data = pytest.importorskip("speculators.train.data")
    layers = [torch.full((3, 4), float(layer)) for layer in range(4)]
    write_sample(sample_path(tmp_path, 0), [5, 6, 7], [0, 1, 1], layers)
    row = data.Eagle3SampleFileDataset(max_len=16, datapath=str(tmp_path))[0]
    assert row["input_ids"].tolist() == [6, 7]
    assert row["loss_mask"].tolist() == [1, 1]
    assert torch.equal(row["hidden_states"], torch.cat(layers[:3], dim=-1)[:2])
    assert torch.equal(row["verifier_last_hidden_states"], layers[3][:2])
