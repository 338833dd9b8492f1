"""One sample file, read once: what its layers hold, row by row, in bounded memory.

The file is mapped, not loaded, and a layer is looked at in blocks of rows.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, islice, permutations
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from eagle3compat.kimi.manifest import input_digest, layer_checksum

if TYPE_CHECKING:
    import torch

SAMPLE_KEYS = ("input_ids", "loss_mask", "hidden_states")
# Elements of a block of rows: small enough for a processor's cache.
_BLOCK_ELEMENTS = 1 << 19
_SUM_BYTES = 8
_ELEMENT_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}
# Bytes hashed at most to find out how one layer came to differ.
_SEARCH_BYTES = 1 << 28
# What torch.load raises for a file that is no sample, or half of one.
_LOADING_ERRORS = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    UnpicklingError,
    zipfile.BadZipFile,
)


@dataclass(frozen=True)
class LayerScan:
    """What one layer's tensor holds.

    Args:
        shape: of the tensor.
        dtype: such as ``"bfloat16"``.
        row_sums: of each row's bits, as `eagle3compat.kimi.manifest.layer_checksum` defines them.
        checksum: of ``row_sums``.
        mean_norm: mean Euclidean norm of a row.
        zero_rows: rows that are all zero.
        infinite_rows: rows that hold a NaN or an infinity.
    """

    shape: tuple[int, ...]
    dtype: str
    row_sums: tuple[int, ...]
    checksum: str
    mean_norm: float
    zero_rows: tuple[int, ...]
    infinite_rows: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows, one a token."""
        return self.shape[0] if self.shape else 0

    @property
    def zeroed(self) -> bool:
        """Whether it holds zeros alone."""
        return len(self.zero_rows) == self.rows


@dataclass(frozen=True)
class SampleScan:
    """What one sample file holds.

    Args:
        path: of the file.
        bytes: its size.
        input_ids: token ids.
        loss_mask: of 0 and 1; None where the file has none.
        layers: in the order of the file.
        last_row: of the last layer, [hidden size]; None where there is none.
        broken_record: part of the archive whose CRC-32 does not hold; None where it was not
            looked for.
    """

    path: Path
    bytes: int
    input_ids: list[int]
    loss_mask: list[int] | None
    layers: list[LayerScan]
    last_row: torch.Tensor | None = field(repr=False)
    broken_record: str | None = None

    @property
    def digest(self) -> str:
        """Of token ids and loss mask (`eagle3compat.kimi.manifest.input_digest`)."""
        return input_digest(self.input_ids, self.loss_mask or [])

    @property
    def checksums(self) -> tuple[str, ...]:
        """Of the layers, in the order of the file."""
        return tuple(layer.checksum for layer in self.layers)


class UnreadableSampleError(Exception):
    """A file is no sample; the message says why, without its path."""


def scan_sample(path: Path, *, archive: bool = False) -> SampleScan:
    """Read one sample file through.

    Args:
        path: of the file.
        archive: whether the archive's own checksums are checked too, which reads it twice.

    Raises:
        UnreadableSampleError: it is not there, cut, no file of torch's, or no sample.
    """
    sample = load_sample(path)
    states = sample["hidden_states"]
    whole = bool(states) and states[-1].dim() == 2 and len(states[-1]) > 0
    mask = sample["loss_mask"]
    return SampleScan(
        path=path,
        bytes=path.stat().st_size,
        input_ids=sample["input_ids"].tolist(),
        loss_mask=None if mask is None else mask.tolist(),
        layers=[scan_layer(layer) for layer in states],
        last_row=states[-1][-1].clone() if whole else None,
        broken_record=_broken_record(path) if archive else None,
    )


def _broken_record(path: Path) -> str | None:
    """The first part of an archive that is not what was written, by its CRC-32.

    torch can be told to write none; it then says 0.
    """
    with path.open("rb") as stream:
        if stream.read(2) != b"PK":
            return None
    try:
        with zipfile.ZipFile(path) as archive:
            if any(record.CRC for record in archive.infolist()):
                return archive.testzip()
    except zipfile.BadZipFile as error:
        return str(error)
    return None


def load_sample(path: Path) -> dict[str, Any]:
    """The content of a sample file, its tensors mapped into memory and their kinds checked.

    Raises:
        UnreadableSampleError: as for `scan_sample`.
    """
    import torch

    try:
        with path.open("rb") as stream:
            is_archive = stream.read(2) == b"PK"
        if is_archive and not zipfile.is_zipfile(path):
            raise UnreadableSampleError(f"cut: its end is missing ({path.stat().st_size} bytes)")
        sample = torch.load(path, weights_only=True, map_location="cpu", mmap=is_archive or None)
    except FileNotFoundError:
        raise UnreadableSampleError("is missing") from None
    except _LOADING_ERRORS as error:
        first_line = next(iter(str(error).splitlines()), "")
        reason = f"{type(error).__name__}: {first_line}".strip(": ")
        raise UnreadableSampleError(f"cannot be loaded ({reason[:160]})") from error
    _check_kinds(sample)
    return {key: sample[key] for key in SAMPLE_KEYS}


def _check_kinds(sample: object) -> None:
    import torch

    if not isinstance(sample, dict):
        raise UnreadableSampleError(f"holds {type(sample).__name__}, expected a dictionary")
    missing = [key for key in SAMPLE_KEYS if key not in sample]
    if missing:
        raise UnreadableSampleError(f"holds no {' and no '.join(missing)}")
    for key in ("input_ids", "loss_mask"):
        value = sample[key]
        if key == "loss_mask" and value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.is_floating_point():
            raise UnreadableSampleError(f"{key} is no list of integers: {_describe(value)}")
    states = sample["hidden_states"]
    if not isinstance(states, list | tuple) or not all(map(_is_floating_tensor, states)):
        raise UnreadableSampleError(
            f"hidden_states is no list of tensors, one a layer: {_describe(states)}"
        )


def _is_floating_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _describe(value: object) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def scan_layer(states: torch.Tensor) -> LayerScan:
    """Look at every row of one layer, [rows, hidden size]; of another shape, at none."""
    import torch

    shape, dtype = tuple(states.shape), str(states.dtype).removeprefix("torch.")
    if states.dim() != 2:
        return LayerScan(shape, dtype, (), "", 0.0, (), ())
    norms = torch.empty(len(states))
    sums = torch.empty(len(states), dtype=torch.int64)
    step = max(1, _BLOCK_ELEMENTS // max(1, shape[1]))
    for start in range(0, len(states), step):
        block = states[start : start + step]
        sums[start : start + step] = _bit_sums(block)
        norms[start : start + step] = block.float().norm(dim=-1)
    suspects = (~norms.isfinite()).nonzero().flatten().tolist()
    infinite = tuple(row for row in suspects if not bool(states[row].isfinite().all()))
    return LayerScan(
        shape=shape,
        dtype=dtype,
        row_sums=tuple(sums.tolist()),
        checksum=checksum_of(sums.tolist()),
        mean_norm=float(norms.mean()) if len(norms) else 0.0,
        zero_rows=tuple((norms == 0).nonzero().flatten().tolist()),
        infinite_rows=infinite,
    )


def _bit_sums(block: torch.Tensor) -> torch.Tensor:
    import torch

    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = block.contiguous().view(integers[block.element_size()])
    # NumPy's sum of 16-bit integers takes a tenth of torch's time.
    return torch.from_numpy(bits.numpy().sum(axis=-1, dtype="int64"))


def checksum_of(row_sums: Iterable[int]) -> str:
    """The manifest's checksum of a layer with these sums of its rows' bits."""
    return layer_checksum(_packed(row_sums))


def explain_rows(layer: LayerScan, checksum: str) -> str | None:
    """How a layer differs from one with another checksum, if by one small change to its rows.

    Tried are: all rows moved on by some places, one bit of one row, two rows exchanged, and one row
    moved elsewhere. What is found is certain, for the checksum then fits. A layer of some thousand
    rows has more such changes than are tried: the search ends after a quarter of a second.

    Returns:
        Such as ``"rows 3 and 7 are exchanged"``; None if nothing that was tried explains it.
    """
    tries = _SEARCH_BYTES // (_SUM_BYTES * max(1, layer.rows))
    for sums, change in islice(_small_changes(layer), tries):
        if layer_checksum(sums) == checksum:
            return change
    return None


def _small_changes(layer: LayerScan) -> Iterator[tuple[bytes, str]]:
    """What the sums of rows were before each change that could have been made, and the change."""
    sums = [_packed([each]) for each in layer.row_sums]
    rows, joined = len(sums), b"".join(sums)
    for places in range(1, rows):
        cut = places * _SUM_BYTES
        yield joined[cut:] + joined[:cut], f"rows are moved on by {places}"
    for row in range(rows):
        before, after = joined[: row * _SUM_BYTES], joined[(row + 1) * _SUM_BYTES :]
        for bit in range(_ELEMENT_BITS.get(layer.dtype, 32)):
            for change in (1 << bit, -(1 << bit)):
                original = _packed([layer.row_sums[row] + change])
                yield before + original + after, f"one bit of row {row} is flipped"
    for one, other in combinations(range(rows), 2):
        exchanged = [*sums]
        exchanged[one], exchanged[other] = sums[other], sums[one]
        yield b"".join(exchanged), f"rows {one} and {other} are exchanged"
    for origin, place in permutations(range(rows), 2):
        moved_back = [*sums]
        moved_back.insert(origin, moved_back.pop(place))
        yield b"".join(moved_back), f"row {origin} is moved to {place}"


def _packed(row_sums: Iterable[int]) -> bytes:
    return b"".join(each.to_bytes(_SUM_BYTES, "little", signed=True) for each in row_sums)
