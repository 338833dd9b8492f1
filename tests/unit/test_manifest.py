"""The manifest says what is done, and survives being cut at any byte."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manifest_records import run_record, sample_record

from eagle3compat.errors import InputError
from eagle3compat.kimi.manifest import (
    EndRecord,
    ManifestWriter,
    Proof,
    input_digest,
    manifest_path,
    read_manifest,
    read_manifests,
)

SHARD = (0, 1)
RECORDS = (
    run_record(),
    sample_record(0),
    sample_record(1, reason="nothing but zeros", proof=None),
    sample_record(1),
    EndRecord(0, 3.5, 6),
)


def write(path: Path, *records: object) -> None:
    writer = ManifestWriter(path)
    writer.append(records)  # type: ignore[arg-type]
    writer.close()


def test_records_come_back_and_the_last_word_on_a_sample_counts(tmp_path: Path) -> None:
    path = manifest_path(tmp_path, SHARD)
    write(path, *RECORDS[:3])
    manifest = read_manifest(path, SHARD)
    assert manifest.runs == [RECORDS[0]]
    assert (list(manifest.done), list(manifest.set_aside)) == ([0], [1])
    write(path, *RECORDS[3:])
    manifest = read_manifest(path, SHARD)
    assert manifest.samples == {0: RECORDS[1], 1: RECORDS[3]}
    assert manifest.ends == [RECORDS[4]]
    assert not manifest.set_aside


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_manifest_cut_anywhere_reads_and_is_gone_on_with(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = manifest_path(tmp_path_factory.mktemp("cut"), SHARD)
    write(path, *RECORDS)
    content = path.read_bytes()
    cut = content[: data.draw(st.integers(0, len(content)))]
    path.write_bytes(cut)
    whole = cut.count(b"\n")
    read = read_manifest(path, SHARD)
    assert len(read.runs) + len(read.ends) == sum(n < whole for n in (0, 4))
    write(path, sample_record(9))
    assert read_manifest(path, SHARD).samples == {**read.samples, 9: sample_record(9)}


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"kind": "sample"}', '{"kind": "x"}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = manifest_path(tmp_path, SHARD)
    write(path, RECORDS[0])
    with path.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(InputError, match=r"manifest-0-of-1\.jsonl:2: no line of a manifest"):
        read_manifest(path, SHARD)


def test_the_manifests_of_all_shards_are_read_in_their_order(tmp_path: Path) -> None:
    for shard in ((10, 11), (2, 11)):
        write(manifest_path(tmp_path, shard), run_record(shard=shard))
    assert [each.shard for each in read_manifests(tmp_path)] == [(2, 11), (10, 11)]
    write(manifest_path(tmp_path, (0, 2)), run_record())
    with pytest.raises(InputError, match="splits into 2 and 11 shards"):
        read_manifests(tmp_path)


def test_a_proof_holds_where_tokens_agree_or_rounding_explains_it() -> None:
    assert Proof(5, 5, 0.0, 0.1).holds
    assert Proof(5, 6, 0.1, 0.1).holds
    assert not Proof(5, 6, 0.2, 0.1).holds
    assert not Proof(5, 6, math.nan, 0.1).holds
    assert not Proof(5, 6, 0.1, math.nan).holds


def test_an_input_digest_tells_tokens_and_masks_apart() -> None:
    digests = {
        input_digest(ids, mask)
        for ids, mask in (([1, 23], [0, 1]), ([12, 3], [0, 1]), ([1, 23], [1, 1]), ([1], [1]))
    }
    assert len(digests) == 4
