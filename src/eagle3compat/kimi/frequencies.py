"""How often each token is to be predicted: what a draft's vocabulary is chosen from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from eagle3compat.errors import InputError
from eagle3compat.kimi.storage import write_whole

# speculators' own token_freq.pt ends in "pt", which its trainer takes for a sample, carries no word
# of the data that it counts, and is reused for any other.
FREQUENCY_FILE = "token_frequencies.json"


@dataclass(frozen=True)
class TokenFrequencies:
    """Counts of the tokens that a draft is to predict, over a data set.

    Attributes:
        counts: by token id; tokens that were not seen are left out.
        digest: of the samples that were counted (`eagle3compat.kimi.dataset.combined_digest`).
        vocab_size: of the verifier; every id is below it.
    """

    counts: Counter[int]
    digest: str
    vocab_size: int


def count_predicted(input_ids: Sequence[int], loss_mask: Sequence[int]) -> Counter[int]:
    """Counts of a sample's marked tokens, which speculators counts, and of those that end them.

    A mask stops before the marker that ends a turn, but the draft must be able to propose it.

    Args:
        input_ids: s token ids.
        loss_mask: s values of 0 or 1.
    """
    counts = Counter(token for token, marked in zip(input_ids, loss_mask, strict=True) if marked)
    ends = [stop for stop, (one, next_one) in enumerate(pairwise(loss_mask), 1) if one > next_one]
    counts.update(input_ids[stop] for stop in ends)
    return counts


def write_frequencies(path: Path, frequencies: TokenFrequencies) -> None:
    """Write them as JSON; the file appears whole or not at all."""
    content = {
        "digest": frequencies.digest,
        "vocab_size": frequencies.vocab_size,
        "counts": {str(token): count for token, count in sorted(frequencies.counts.items())},
    }
    write_whole(path, lambda stream: stream.write(json.dumps(content).encode("ascii") + b"\n"))


def read_frequencies(path: Path, digest: str | None = None) -> TokenFrequencies:
    """Read them back.

    Args:
        path: from `write_frequencies`.
        digest: of the samples that they must have been counted over; None for any.

    Raises:
        InputError: the file cannot be read, or counts another data set.
    """
    try:
        content = json.loads(path.read_text(encoding="ascii"))
        frequencies = TokenFrequencies(
            Counter({int(token): int(count) for token, count in content["counts"].items()}),
            str(content["digest"]),
            int(content["vocab_size"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: expected token frequencies as prepare writes them ({error!r})"
        ) from error
    if digest is not None and frequencies.digest != digest:
        raise InputError(
            f"{path}: counts the samples {frequencies.digest}, not {digest}: another data set; "
            "run prepare on this one"
        )
    return frequencies
