"""The draft's vocabulary: which of the verifier's tokens it can predict.

speculators counts how often each token is one that the draft learns to predict, and takes the most
frequent ones; beside the marked tokens, those that end a turn are counted (`frequencies`). Two
arrays say which: ``d2t`` (int64 ``[draft vocabulary size]``: add it to a draft's token id to get
the verifier's) and ``t2d`` (bool ``[vocabulary size]``: the verifier's tokens that the draft has).
Where fewer tokens occur than the draft's vocabulary holds, speculators fills it up with the lowest
token ids that do not occur; `Vocabulary.filled` says how many.

The files carry the size and a digest of the data in their names, and are checked before they are
used again: a vocabulary of another size, of other data or of another speculators is made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from eagle3compat.errors import InputError
from eagle3compat.kimi.dataset import SampleFile, combined_digest
from eagle3compat.kimi.frequencies import count_predicted
from eagle3compat.kimi.manifest import input_digest
from eagle3compat.kimi.storage import write_whole

if TYPE_CHECKING:
    import torch

    from eagle3compat.kimi.verifier import Verifier

DEFAULT_SIZE = 32_000
SHORT_DIGEST = 12
"""Hexadecimal digits of the data's digest in a file's name; the whole one is in the JSON."""
_UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class Vocabulary:
    """A draft's vocabulary on the disk.

    Args:
        size: tokens that the draft has.
        target_size: tokens that the verifier has.
        digest: of the inputs that were counted (`combined_digest`).
        speculators: version whose function chose the tokens.
        occurring: different tokens among those to be predicted.
        predicted: tokens to be predicted, repeats included.
        covered: how many of them the draft has.
        d2t_sha256: of the array's bytes.
        t2d_sha256: likewise.
    """

    size: int
    target_size: int
    digest: str
    speculators: str
    occurring: int
    predicted: int
    covered: int
    d2t_sha256: str
    t2d_sha256: str

    @property
    def coverage(self) -> float:
        """The share of what is to be predicted that the draft can predict."""
        return self.covered / self.predicted

    @property
    def filled(self) -> int:
        """Tokens of the draft that never occur in the data: the lowest ids of that kind."""
        return max(0, self.size - self.occurring)

    def d2t_path(self, folder: Path) -> Path:
        """Where the offsets are."""
        return folder / f"{file_stem('d2t', self.size, self.digest)}.npy"

    def t2d_path(self, folder: Path) -> Path:
        """Where the flags are."""
        return folder / f"{file_stem('t2d', self.size, self.digest)}.npy"

    def summary_path(self, folder: Path) -> Path:
        """Where this record is; it is written last."""
        return folder / f"{file_stem('vocabulary', self.size, self.digest)}.json"


def file_stem(kind: str, size: int, digest: str) -> str:
    """The name of a vocabulary's file without its ending: ``d2t-32000-0123456789ab``."""
    return f"{kind}-{size}-{digest[:SHORT_DIGEST]}"


def settle_size(asked: int | None, verifier: Verifier) -> int:
    """The draft's vocabulary size: what was asked for, or 32,000 and at most the verifier's.

    Raises:
        InputError: it is not from 1 to the verifier's.
    """
    if asked is None:
        return min(DEFAULT_SIZE, verifier.vocab_size)
    if not 1 <= asked <= verifier.vocab_size:
        raise InputError(
            f"--draft-vocab-size {asked}: expected 1 to {verifier.vocab_size}, the size of "
            f"{verifier.path}'s vocabulary"
        )
    return asked


def count_rows(data: Path, verifier: Verifier) -> tuple[dict[int, int], str]:
    """Count the tokens to be predicted in a prepared data set.

    Args:
        data: a ``.jsonl`` of rows with ``input_ids`` and ``loss_mask``, or a prepared folder.
        verifier: whose vocabulary bounds the token ids.

    Returns:
        How often each token occurs, and the digest of the inputs: that of the extraction that is
        made of them.

    Raises:
        InputError: naming the file and the line.
    """
    samples = SampleFile(data, verifier, _UNBOUNDED)
    if samples.unmasked:
        raise InputError(
            f"--data {data}: {samples.unmasked} rows have no loss_mask; which tokens a draft "
            "learns to predict cannot be told. Prepare the data first"
        )
    counts: Counter[int] = Counter()
    digest = combined_digest(())
    for sample in samples:
        own = input_digest(sample.input_ids, sample.loss_mask)
        digest = combined_digest((digest, own))
        counts.update(count_predicted(sample.input_ids, sample.loss_mask))
    return dict(counts), digest


def make_vocabulary(
    folder: Path, counts: Mapping[int, int], digest: str, size: int, target_size: int
) -> Vocabulary:
    """Let speculators choose the draft's tokens, or take the files that say so already.

    Args:
        folder: where the files are and come to be.
        counts: how often each token is one to be predicted.
        digest: of the inputs that were counted.
        size: of the draft's vocabulary.
        target_size: of the verifier's.

    Raises:
        InputError: nothing is to be predicted, a token is outside the verifier's vocabulary, or
            the folder cannot be written to.
    """
    from importlib.metadata import version

    _check_counts(counts, target_size)
    there = read_vocabulary(folder, size, digest)
    speculators = version("speculators")
    if there and (there.target_size, there.speculators) == (target_size, speculators):
        return there
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    d2t, t2d = build_vocab_mappings_from_distribution(dict(counts), size, target_size)
    chosen = _tokens_of(d2t, t2d, size)
    made = Vocabulary(
        size=size,
        target_size=target_size,
        digest=digest,
        speculators=speculators,
        occurring=len(counts),
        predicted=sum(counts.values()),
        covered=sum(counts.get(token, 0) for token in chosen),
        d2t_sha256=_sha256(d2t),
        t2d_sha256=_sha256(t2d),
    )
    _write(folder, made, d2t, t2d)
    return made


def read_vocabulary(folder: Path, size: int, digest: str) -> Vocabulary | None:
    """A vocabulary that is there and whole, or None.

    Args:
        folder: where the files are.
        size: of the draft's vocabulary.
        digest: of the inputs that were counted.
    """
    path = folder / f"{file_stem('vocabulary', size, digest)}.json"
    try:
        found = Vocabulary(**json.loads(path.read_text(encoding="utf-8")))
        arrays = load_arrays(folder, found)
    except (OSError, ValueError, TypeError):
        return None
    whole = (_sha256(arrays[0]), _sha256(arrays[1])) == (found.d2t_sha256, found.t2d_sha256)
    return found if whole and (found.size, found.digest) == (size, digest) else None


def load_arrays(folder: Path, vocabulary: Vocabulary) -> tuple[torch.Tensor, torch.Tensor]:
    """``d2t`` (int64) and ``t2d`` (bool) of a vocabulary.

    Raises:
        OSError, ValueError: a file is missing, or no array.
    """
    import numpy
    import torch

    d2t = numpy.load(vocabulary.d2t_path(folder), allow_pickle=False)
    t2d = numpy.load(vocabulary.t2d_path(folder), allow_pickle=False)
    return torch.from_numpy(d2t), torch.from_numpy(t2d)


def _check_counts(counts: Mapping[int, int], target_size: int) -> None:
    if not counts:
        raise InputError(
            "no token is one to be predicted: every loss mask is all zeros. Prepare the data anew"
        )
    outside = [token for token in counts if not 0 <= token < target_size]
    if outside:
        raise InputError(
            f"token id {outside[0]}: outside the verifier's vocabulary (0 to {target_size - 1})"
        )


def _tokens_of(d2t: torch.Tensor, t2d: torch.Tensor, size: int) -> list[int]:
    """The verifier's ids of the draft's tokens; speculators' two arrays have to agree on them."""
    tokens: list[int] = [index + offset for index, offset in enumerate(d2t.tolist())]
    if tokens != t2d.nonzero().flatten().tolist() or len(tokens) != size:
        raise RuntimeError("speculators' d2t and t2d do not name the same tokens")
    return tokens


def _write(folder: Path, vocabulary: Vocabulary, d2t: torch.Tensor, t2d: torch.Tensor) -> None:
    import numpy

    def array(values: torch.Tensor) -> Any:
        def write(stream: BinaryIO) -> None:
            numpy.save(stream, values.numpy(), allow_pickle=False)

        return write

    record = json.dumps(asdict(vocabulary), indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(vocabulary.d2t_path(folder), array(d2t))
        write_whole(vocabulary.t2d_path(folder), array(t2d))
        write_whole(vocabulary.summary_path(folder), lambda stream: _put(stream, record))
    except OSError as error:
        raise InputError(f"{folder}: the vocabulary cannot be written ({error})") from error


def _put(stream: BinaryIO, text: str) -> None:
    stream.write(text.encode("utf-8"))


def _sha256(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()
