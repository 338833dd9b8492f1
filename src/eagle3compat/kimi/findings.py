"""What an audit found: each finding names the sample or file, its kind, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby


class Kind(str, Enum):
    """What is wrong."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    CUT = "cut"
    ANOTHER_SAMPLE = "another sample"
    INPUT = "input"
    LAYERS = "layers"
    ZEROED = "zeroed"
    NOT_FINITE = "not finite"
    ROWS = "rows"
    BITS = "bits"
    SHAPE = "shape"
    SIZE = "size"
    NEXT_TOKEN = "next token"
    TEXT = "text"
    EXTRACTED_ANEW = "extracted anew"
    SET_ASIDE = "set aside"
    STRAY = "stray file"
    UNFINISHED = "unfinished"
    SHARD = "shard"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Args:
        kind: what sort of fault it is.
        place: the file, or what stands for it, relative to the folder.
        what: what is wrong with it, in words.
        sample: number of the sample; None where the finding is about no single one.
    """

    kind: Kind
    place: str
    what: str
    sample: int | None = None


def ranges(numbers: Iterable[int], most: int = 4) -> str:
    """Numbers in words that stay short: ``0-16, 18, 20-22 and 5 more``.

    Args:
        numbers: in any order.
        most: ranges that are written out.
    """
    ordered = enumerate(sorted(set(numbers)))
    runs = [
        [number for _, number in run] for _, run in groupby(ordered, lambda pair: pair[1] - pair[0])
    ]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:most]]
    left = sum(len(run) for run in runs[most:])
    return ", ".join(words) + (f" and {left} more" if left else "")


def rows_in_words(rows: Sequence[int]) -> str:
    """``row 3``, ``rows 17-39``."""
    return f"row{'' if len(rows) == 1 else 's'} {ranges(rows)}"


def layers_in_words(layers: Sequence[int], all_layers: Sequence[int]) -> str:
    """``layer 4``, ``layers 2, 4``, ``every layer``.

    Args:
        layers: some layer ids.
        all_layers: of the sample.
    """
    if len(all_layers) > 1 and len(layers) == len(all_layers):
        return "every layer"
    return f"layer{'' if len(layers) == 1 else 's'} {', '.join(map(str, layers))}"
