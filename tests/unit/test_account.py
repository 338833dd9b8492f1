"""Proved samples get their place, others are set aside, and the manifest says which."""

from __future__ import annotations

from pathlib import Path

import pytest
from manifest_records import run_record

from eagle3compat.errors import InterruptedRun, Refusal
from eagle3compat.kimi.account import HOPELESS, Account, Settled
from eagle3compat.kimi.exchange import Written
from eagle3compat.kimi.manifest import ManifestWriter, Proof, SampleRecord, read_manifest
from eagle3compat.kimi.storage import ExtractionFolder, sample_path

RIGHT, WRONG = Proof(5, 5, 0.0, 0.1), Proof(5, 6, 3.0, 0.1)


class Place:
    """A claimed folder with an account of it."""

    def __init__(self, path: Path) -> None:
        self.folder = ExtractionFolder(path)
        self.lock = self.folder.claim()
        self.records: list[SampleRecord] = []
        self.manifest = ManifestWriter(self.folder.manifest)
        self.manifest.append([run_record()])
        self.account = Account(self.folder, self.manifest, 0, self.records.append)

    def settle(self, index: int, proof: Proof | None, fault: str | None = None) -> None:
        sample_path(self.folder.unfinished, index).write_bytes(b"states")
        written = Written(f"sample_{index}", index, 3, 6, (1.0,), ("a",), fault)
        self.account.settle(Settled(written, proof, index + 1, "digest"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_proved_sample_gets_its_place_and_another_is_set_aside(place: Place) -> None:
    place.settle(0, RIGHT)
    place.settle(1, WRONG)
    place.settle(2, None, "states that are not finite in its layer 1 of 1")
    place.account.finish()
    assert sample_path(place.folder.samples, 0).exists()
    assert [entry.name for entry in place.folder.samples.iterdir()] == ["data_0.pt"]
    assert len(list(place.folder.set_aside.iterdir())) == 2
    assert not list(place.folder.unfinished.iterdir())
    manifest = read_manifest(place.folder.manifest, (0, 1))
    assert list(manifest.done) == [0]
    assert "gives the next token 6, the engine sampled 5" in str(manifest.samples[1].reason)
    assert "not finite" in str(manifest.samples[2].reason)
    assert [record.index for record in place.records] == [0, 1, 2]
    assert (place.account.done, place.account.tokens, place.account.bytes) == (1, 3, 6)


def test_a_sample_that_is_right_the_second_time_is_no_longer_set_aside(place: Place) -> None:
    place.settle(0, WRONG)
    place.account.finish()
    place.account = Account(place.folder, place.manifest, 1, place.records.append)
    place.settle(0, RIGHT)
    place.account.finish()
    assert not list(place.folder.set_aside.iterdir())
    assert not read_manifest(place.folder.manifest, (0, 1)).set_aside


def test_a_run_whose_first_samples_all_fail_ends(place: Place) -> None:
    with pytest.raises(Refusal, match=f"none among the first {HOPELESS}"):
        for index in range(HOPELESS):
            place.settle(index, WRONG)
        place.account.finish()
    assert len(read_manifest(place.folder.manifest, (0, 1)).set_aside) == HOPELESS


def test_a_file_that_cannot_be_placed_ends_the_run_and_is_not_in_the_manifest(
    place: Place,
) -> None:
    place.settle(0, RIGHT)
    written = Written("sample_1", 1, 3, 6, (1.0,), ("a",), None)
    place.account.settle(Settled(written, RIGHT, 2, "digest"))  # nobody wrote its file
    with pytest.raises(InterruptedRun, match="cannot be put in its place"):
        place.account.finish()
    assert 1 not in read_manifest(place.folder.manifest, (0, 1)).samples
