"""The manifest: what of a data set is extracted, by which builds, and with what proof.

One file a shard, ``manifest-{i}-of-{n}.jsonl``: JSON objects, one a line, only ever appended, each
durable before the next. The kinds of lines:

``run``
    One start of an extraction: `RunRecord`. The lines after it are its own.
``sample``
    A sample whose file is in place and whose proof holds: `SampleRecord`.
``set aside``
    A sample whose proof failed: a `SampleRecord` with a ``reason``, its file under ``set_aside``.
``end``
    The run came to its end: seconds and tokens.

A later line on the same sample replaces an earlier one. A last line that was cut by a kill counts
for nothing: its sample is extracted again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError

# Unit of the last place of 1.
EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
MANIFEST_NAME = re.compile(r"manifest-(\d+)-of-(\d+)\.jsonl")
DIGEST_BYTES = 16
# Bytes; a line of 61 layers has about 8,000.
LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Proof:
    """The engine's greedy next token beside what the stored last state says.

    Args:
        next_token: token that the engine sampled greedily after the prompt.
        top: token with the largest logit of the stored last state, through final norm and lm_head.
        shortfall: how far the logit of ``next_token`` is below that of ``top``; 0 where they agree.
        allowed: the shortfall that the dtype's rounding explains.
    """

    next_token: int
    top: int
    shortfall: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether rounding explains the difference. A NaN is never explained."""
        return self.next_token == self.top or self.shortfall <= self.allowed


def allowed_shortfall(dtype: str, largest_logit: float) -> float:
    """How far below the top logit the sampled token's may be for rounding to explain it.

    The stored state is rounded once more than the one that the engine went on with, and kernels
    sum in another order for another number of rows.

    Args:
        dtype: of the states: a key of `EPSILON`.
        largest_logit: the largest absolute logit of the row.
    """
    return max(4 * EPSILON[dtype], 1e-5) * largest_logit


@dataclass(frozen=True)
class SampleRecord:
    """What is known of one sample's file.

    Args:
        index: number of the sample in the data set, from 0; the file is ``data_{index}.pt``.
        line: line of the data file, from 1.
        input_digest: of token ids and loss mask (`input_digest`).
        tokens: rows of each layer.
        bytes: size of the file.
        layer_norms: mean Euclidean norm of a row, one a layer, in the order of the layer ids.
        checksums: of each layer's bits (`layer_checksum`), in the same order.
        proof: of the next token; None where the last layer was not asked for.
        run: number of the run that made it, from 0.
        time: when it was done, in seconds since 1970.
        reason: why it was set aside; None where it was not.
    """

    index: int
    line: int
    input_digest: str
    tokens: int
    bytes: int
    layer_norms: tuple[float, ...]
    checksums: tuple[str, ...]
    proof: Proof | None
    run: int
    time: float
    reason: str | None = None

    @property
    def done(self) -> bool:
        """Whether the sample's file can be trained on."""
        return self.reason is None


@dataclass(frozen=True)
class RunRecord:
    """One start of an extraction.

    Args:
        run: number of the run in this manifest, from 0.
        started: in seconds since 1970.
        builds: of ``eagle3compat``, ``vllm``, ``speculators`` and ``torch``: distribution, version
            and commit, as a line each.
        shims: ids of the shims that were applied, in their order.
        model: folder of the verifier.
        model_digest: of its config.json and of its weight files' names and sizes.
        layers: layer ids in the order of each sample's tensors; the last is the target.
        hidden_size: of the verifier.
        dtype: of the states, such as ``"bfloat16"``.
        data: the data file.
        samples: samples of the whole data set, all shards.
        data_digest: of all of them (`dataset.SampleFile.digest`).
        shard: number of this shard, from 0, and how many there are.
        settings: what decides which samples share a step: ``max_model_len``,
            ``max_num_batched_tokens``, ``max_num_seqs``, ``tensor_parallel_size``.
    """

    run: int
    started: float
    builds: dict[str, str]
    shims: tuple[str, ...]
    model: str
    model_digest: str
    layers: tuple[int, ...]
    hidden_size: int
    dtype: str
    data: str
    samples: int
    data_digest: str
    shard: tuple[int, int]
    settings: dict[str, int]


@dataclass(frozen=True)
class EndRecord:
    """The end of a run that reached it.

    Args:
        run: its number.
        seconds: from the first step of the engine until the last byte was safe.
        tokens: extracted in it.
    """

    run: int
    seconds: float
    tokens: int


@dataclass
class Manifest:
    """What one manifest file says: the runs, and the last word on every sample."""

    path: Path
    shard: tuple[int, int]
    runs: list[RunRecord] = field(default_factory=list)
    samples: dict[int, SampleRecord] = field(default_factory=dict)
    ends: list[EndRecord] = field(default_factory=list)

    @property
    def done(self) -> dict[int, SampleRecord]:
        """The samples that can be trained on."""
        return {index: record for index, record in self.samples.items() if record.done}

    @property
    def set_aside(self) -> dict[int, SampleRecord]:
        """The samples whose proof failed."""
        return {index: record for index, record in self.samples.items() if not record.done}


def input_digest(input_ids: Sequence[int], loss_mask: Sequence[int]) -> str:
    """A digest of one sample's input, the same on every machine.

    Args:
        input_ids: s token ids.
        loss_mask: s values of 0 or 1.
    """
    text = f"{','.join(map(str, input_ids))};{''.join(map(str, loss_mask))}"
    return blake2b(text.encode("ascii"), digest_size=DIGEST_BYTES).hexdigest()


def layer_checksum(row_sums: bytes) -> str:
    """The checksum of one layer of one sample.

    Args:
        row_sums: for each row, the sum of its elements' bits read as signed integers of the
            element's size (int16 for bfloat16, int32 for float32), as an int64, little-endian.
            A row's sum is cheap on a device; a changed bit changes it, and rows in another order
            change the digest.
    """
    return blake2b(row_sums, digest_size=DIGEST_BYTES).hexdigest()


def manifest_path(folder: Path, shard: tuple[int, int]) -> Path:
    """Where the manifest of a shard (number from 0, count) is kept."""
    return folder / f"manifest-{shard[0]}-of-{shard[1]}.jsonl"


def read_manifests(folder: Path) -> list[Manifest]:
    """The manifests of every shard in an extraction's folder, by number.

    Raises:
        InputError: a line that is no record, other than a cut last one; or shards of different
            counts.
    """
    shards = sorted(
        (int(match[1]), int(match[2]))
        for entry in folder.iterdir()
        if (match := MANIFEST_NAME.fullmatch(entry.name))
    )
    counts = {count for _, count in shards}
    if len(counts) > 1:
        splits = " and ".join(map(str, sorted(counts)))
        raise InputError(f"{folder}: has manifests of splits into {splits} shards; expected one")
    return [read_manifest(manifest_path(folder, shard), shard) for shard in shards]


def read_manifest(path: Path, shard: tuple[int, int]) -> Manifest:
    """What a manifest says; an empty one where there is no such file.

    Raises:
        InputError: a line that is no record, other than a cut last one.
    """
    manifest = Manifest(path, shard)
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            _take(manifest, json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}:{number}: no line of a manifest ({error})") from error
    return manifest


def _whole_lines(path: Path) -> Iterator[str]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield line


def _take(manifest: Manifest, row: dict[str, Any]) -> None:
    kind = row.pop("kind")
    if kind == "run":
        tuples = {key: tuple(row[key]) for key in ("shims", "layers", "shard")}
        manifest.runs.append(RunRecord(**{**row, **tuples}))
    elif kind in ("sample", "set aside"):
        tuples = {key: tuple(row[key]) for key in ("layer_norms", "checksums")}
        proof = None if row["proof"] is None else Proof(**row["proof"])
        record = SampleRecord(**{**row, **tuples, "proof": proof})
        manifest.samples[record.index] = record
    elif kind == "end":
        manifest.ends.append(EndRecord(**row))
    else:
        raise ValueError(f"kind {kind!r}")


class ManifestWriter:
    """Appends to one manifest, durably. The caller holds the folder's lock.

    Args:
        path: of the manifest. A cut last line is taken off first.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._stream = path.open("ab")
        self._drop_cut_line(path)

    def _drop_cut_line(self, path: Path) -> None:
        size = path.stat().st_size
        start = max(0, size - LONGEST_LINE)
        with path.open("rb") as stream:
            stream.seek(start)
            end = stream.read().rfind(b"\n")
        self._stream.truncate(start + end + 1)
        os.fsync(self._stream.fileno())

    def append(self, records: Iterable[RunRecord | SampleRecord | EndRecord]) -> None:
        """Write records, and return when they are on the disk."""
        lines = [json.dumps({"kind": _kind(each), **asdict(each)}) + "\n" for each in records]
        if lines:
            self._stream.write("".join(lines).encode("utf-8"))
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file; nothing is buffered."""
        self._stream.close()


def _kind(record: RunRecord | SampleRecord | EndRecord) -> str:
    if isinstance(record, RunRecord):
        return "run"
    if isinstance(record, EndRecord):
        return "end"
    return "sample" if record.done else "set aside"
