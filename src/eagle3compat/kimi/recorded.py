"""A sample file against what the manifest recorded of it when it was written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from eagle3compat.kimi.findings import Finding, Kind, layers_in_words, rows_in_words
from eagle3compat.kimi.sample_scan import LayerScan, SampleScan, explain_rows

if TYPE_CHECKING:
    from eagle3compat.kimi.manifest import RunRecord, SampleRecord

_Value = TypeVar("_Value")
_Faults = list[tuple[Kind, str]]

# Samples for which it is found out how rows came to differ: up to a quarter of a second a layer.
_EXPLAINED_SAMPLES = 100


@dataclass(frozen=True)
class Recorded:
    """All samples that the manifests record, to tell whose states a file holds.

    Args:
        samples: by number.
        runs: the run of each sample, by the sample's number.
    """

    samples: dict[int, SampleRecord]
    runs: dict[int, RunRecord]
    _explanations: Iterator[int] = field(default_factory=lambda: iter(range(_EXPLAINED_SAMPLES)))

    @cached_property
    def by_digest(self) -> dict[str, int]:
        """The first sample with each digest of an input."""
        return _first((each.input_digest, each.index) for each in self.samples.values())

    @cached_property
    def by_checksum(self) -> dict[str, tuple[int, int]]:
        """The first sample that has a layer of each checksum, and the layer's place in it."""
        return _first(
            (checksum, (each.index, place))
            for each in self.samples.values()
            for place, checksum in enumerate(each.checksums)
        )

    def layer_id(self, sample: int, place: int) -> int:
        """The layer id at a place of a sample."""
        return self.runs[sample].layers[place]

    def judge(self, index: int, scan: SampleScan, place: str) -> list[Finding]:
        """What is wrong with the file of sample ``index``.

        Args:
            index: number of a sample that is recorded.
            scan: of its file.
            place: of the file, for the findings.
        """
        record, run = self.samples[index], self.runs[index]
        found = (
            _input_faults(self, record, scan)
            or _shape_faults(record, run, scan)
            or _state_faults(self, record, run, scan)
            or _size_faults(record, scan)
        )
        return [Finding(kind, place, what, index) for kind, what in found]


def _first(pairs: Iterable[tuple[str, _Value]]) -> dict[str, _Value]:
    found: dict[str, _Value] = {}
    for key, value in pairs:
        found.setdefault(key, value)
    return found


def _input_faults(recorded: Recorded, record: SampleRecord, scan: SampleScan) -> _Faults:
    if scan.loss_mask is None:
        return [(Kind.INPUT, "holds no loss mask")]
    if scan.digest == record.input_digest:
        return []
    owner = recorded.by_digest.get(scan.digest)
    if owner is not None:
        if scan.checksums == recorded.samples[owner].checksums:
            return [(Kind.ANOTHER_SAMPLE, f"is sample {owner}'s file")]
        return [(Kind.ANOTHER_SAMPLE, f"holds the token ids and loss mask of sample {owner}")]
    tokens, mask = len(scan.input_ids), len(scan.loss_mask)
    if tokens < record.tokens:
        return [(Kind.CUT, f"cut: {tokens} of {record.tokens} tokens")]
    if tokens > record.tokens or mask != tokens:
        what = f"{tokens} token ids and {mask} entries of the loss mask, expected {record.tokens}"
        return [(Kind.INPUT, what)]
    return [(Kind.INPUT, "its token ids or its loss mask are not those that were extracted")]


def _shape_faults(record: SampleRecord, run: RunRecord, scan: SampleScan) -> _Faults:
    if len(scan.layers) != len(run.layers):
        return [(Kind.LAYERS, f"{len(scan.layers)} layers, expected {len(run.layers)}")]
    faults: _Faults = []
    for what, layers in _grouped(run.layers, scan.layers, lambda layer: layer.dtype):
        if what != run.dtype:
            words = layers_in_words(layers, run.layers)
            faults.append((Kind.SHAPE, f"{words}: dtype {what}, expected {run.dtype}"))
    right = (record.tokens, run.hidden_size)
    for shape, layers in _grouped(run.layers, scan.layers, lambda layer: layer.shape):
        words = layers_in_words(layers, run.layers)
        if len(shape) != 2 or shape[1] != right[1]:
            faults.append((Kind.SHAPE, f"{words}: shape {list(shape)}, expected {list(right)}"))
        elif shape[0] < right[0]:
            faults.append((Kind.CUT, f"{words}: cut: {shape[0]} of {right[0]} rows"))
        elif shape[0] > right[0]:
            faults.append((Kind.ROWS, f"{words}: {shape[0]} rows, expected {right[0]}"))
    return faults


def _state_faults(
    recorded: Recorded, record: SampleRecord, run: RunRecord, scan: SampleScan
) -> _Faults:
    """How layers of the right shapes differ from those that were extracted."""
    if scan.checksums == record.checksums:
        return _value_faults(run.layers, scan.layers)
    owner = recorded.by_checksum.get(scan.checksums[0]) if scan.checksums else None
    if owner is not None and scan.checksums == recorded.samples[owner[0]].checksums:
        return [(Kind.ANOTHER_SAMPLE, f"holds the states of sample {owner[0]}")]
    if sorted(scan.checksums) == sorted(record.checksums):
        return [(Kind.LAYERS, _order_in_words(record, run, scan))]
    return _value_faults(run.layers, scan.layers) or _changed_layers(recorded, record, run, scan)


def _order_in_words(record: SampleRecord, run: RunRecord, scan: SampleScan) -> str:
    wrong = [
        (layer, run.layers[record.checksums.index(found)])
        for layer, found, right in zip(run.layers, scan.checksums, record.checksums, strict=True)
        if found != right
    ]
    if len(wrong) == 2:
        return f"layers {wrong[0][0]} and {wrong[1][0]} are exchanged"
    order = ", ".join(str(run.layers[record.checksums.index(each)]) for each in scan.checksums)
    return f"layers are in the order {order}, expected {', '.join(map(str, run.layers))}"


def _value_faults(layer_ids: tuple[int, ...], layers: list[LayerScan]) -> _Faults:
    """Zeros and what is not finite. One zero row may be right: a padding token's embedding is."""
    faults: _Faults = []
    for rows, where in _grouped(layer_ids, layers, lambda layer: layer.infinite_rows):
        if rows:
            words = f"NaN or infinity in {rows_in_words(rows)}"
            faults.append((Kind.NOT_FINITE, f"{layers_in_words(where, layer_ids)}: {words}"))
    zeroed = [each for each, layer in zip(layer_ids, layers, strict=True) if layer.zeroed]
    if zeroed:
        faults.append((Kind.ZEROED, f"{layers_in_words(zeroed, layer_ids)}: zeros alone"))
    return faults


def _changed_layers(
    recorded: Recorded, record: SampleRecord, run: RunRecord, scan: SampleScan
) -> _Faults:
    """What became of each layer whose bits are not those that were extracted."""
    changes: dict[tuple[Kind, str], list[int]] = defaultdict(list)
    explain = next(recorded._explanations, None) is not None
    for place, layer in enumerate(scan.layers):
        if layer.checksum != record.checksums[place]:
            change = _change_of(recorded, record, place, layer, explain)
            changes[change].append(run.layers[place])
    return [
        (kind, f"{layers_in_words(layers, run.layers)}: {what}")
        for (kind, what), layers in changes.items()
    ]


def _change_of(
    recorded: Recorded, record: SampleRecord, place: int, layer: LayerScan, explain: bool
) -> tuple[Kind, str]:
    owner = recorded.by_checksum.get(layer.checksum)
    if owner is not None:
        whose = f"the states of layer {recorded.layer_id(*owner)}"
        if owner[0] == record.index:
            return Kind.LAYERS, f"holds {whose}"
        return Kind.ANOTHER_SAMPLE, f"holds {whose} of sample {owner[0]}"
    change = explain_rows(layer, record.checksums[place]) if explain else None
    if change is not None:
        return (Kind.BITS if "bit" in change else Kind.ROWS), change
    if layer.zero_rows:
        return Kind.ZEROED, f"{rows_in_words(layer.zero_rows)} of {layer.rows}: zeros alone"
    norm = record.layer_norms[place]
    return Kind.BITS, (
        "not the states that were extracted (mean norm of a row "
        f"{layer.mean_norm:.6g}, it was {norm:.6g})"
    )


def _size_faults(record: SampleRecord, scan: SampleScan) -> _Faults:
    if scan.bytes == record.bytes:
        return []
    what = f"{scan.bytes:,} bytes, written with {record.bytes:,}; what it holds is as it was"
    return [(Kind.SIZE, what)]


def _grouped(
    layer_ids: Sequence[int], layers: Sequence[LayerScan], key: Callable[[LayerScan], _Value]
) -> ItemsView[_Value, list[int]]:
    """The layer ids that have each value in common."""
    groups: dict[_Value, list[int]] = defaultdict(list)
    for layer_id, layer in zip(layer_ids, layers, strict=True):
        groups[key(layer)].append(layer_id)
    return groups.items()
