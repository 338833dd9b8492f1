"""Reading a ``.jsonl`` data set: rows of token ids, or conversations.

A data set may be larger than memory: `SampleFile` checks every row in one pass, and then keeps
where each stands in its file, not what it holds.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, overload

from eagle3compat.errors import InputError
from eagle3compat.kimi.conversations import Renderer, load_tokenizer, normalize_turns
from eagle3compat.kimi.manifest import DIGEST_BYTES, input_digest
from eagle3compat.kimi.verifier import Verifier

ROW_KEYS = ("input_ids", "messages", "conversations")

PART_PATTERN = "part-*.jsonl"
"""The files of a prepared folder that hold samples, in the order of their names."""
ACCOUNT_FILE = "account.json"
"""A prepared folder has it once all of its parts are there."""


@dataclass(frozen=True)
class Sample:
    """One sequence to extract.

    Attributes:
        line: where it stands in the data file, from 1.
        input_ids: token ids, at least one.
        loss_mask: 0 or 1 for each token; 1 where a draft learns to predict what follows it.
        mask_given: False where the row had token ids without a mask, which then is all ones.
    """

    line: int
    input_ids: list[int]
    loss_mask: list[int]
    mask_given: bool = True


class SampleFile(Sequence[Sample]):
    """The samples of a data set, read from its files when they are asked for.

    A row has ``input_ids`` (and ``loss_mask``; without it, every token counts), or ``messages``, or
    ``conversations``. Other keys are ignored, but ``tools`` goes to the chat template. Blank lines
    are passed over. Nothing is ever cut or dropped. A conversation is several samples where the
    chat template rewrites earlier turns.

    Making one checks every row; it holds about 50 bytes a sample. Samples may be asked for from
    several threads at once.

    Args:
        data: a file with one JSON object a line, in UTF-8; or a folder that ``prepare`` finished.
        verifier: whose vocabulary bounds the token ids and whose chat template renders.
        max_model_len: a sequence and the one token that the engine samples must fit in it.

    Attributes:
        token_counts: tokens of each sample, in order.
        tokens: tokens of all samples.
        unmasked: samples whose row had token ids without a mask.
        digest: which samples these are, whatever their order (`combined_digest`).

    Raises:
        InputError: naming the file and the line.
    """

    def __init__(self, data: Path, verifier: Verifier, max_model_len: int) -> None:
        self.data = data
        self.token_counts = array("Q")
        self.tokens = 0
        self.unmasked = 0
        self._verifier = verifier
        self._max_model_len = max_model_len
        self._renderer = cache(lambda: Renderer(load_tokenizer(verifier.path)))
        self.digest = combined_digest(())
        # Of each sample: its file, its line, where that begins and its bytes, and which of the
        # line's samples it is.
        self._files = [_DataFile(path) for path in data_files(data)]
        self._file_numbers, self._lines = array("L"), array("Q")
        self._offsets, self._sizes, self._places = array("Q"), array("Q"), array("L")
        for number, file in enumerate(self._files):
            self._index(number, file)
        if not self.token_counts:
            raise InputError(f"--data {data}: holds no rows")

    def __len__(self) -> int:
        return len(self.token_counts)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        file = self._files[self._file_numbers[index]]
        line = self._lines[index]
        content = file.read(self._offsets[index], self._sizes[index])
        samples, place = self._read_row(file.path, line, content), self._places[index]
        if place >= len(samples) or len(samples[place].input_ids) != self.token_counts[index]:
            raise InputError(f"{file.path}:{line}: the row changed after it was checked")
        return samples[place]

    def _index(self, number: int, file: _DataFile) -> None:
        for line, offset, content in file.lines():
            for place, sample in enumerate(self._read_row(file.path, line, content)):
                self._count(sample)
                self._file_numbers.append(number)
                self._lines.append(line)
                self._offsets.append(offset)
                self._sizes.append(len(content))
                self._places.append(place)

    def _count(self, sample: Sample) -> None:
        self.token_counts.append(len(sample.input_ids))
        self.tokens += len(sample.input_ids)
        self.unmasked += not sample.mask_given
        digest = input_digest(sample.input_ids, sample.loss_mask)
        self.digest = combined_digest((self.digest, digest))

    def _read_row(self, path: Path, line: int, content: bytes) -> list[Sample]:
        try:
            samples = _samples_from(line, parse_row(content), self._renderer)
            for sample in samples:
                check_sample(sample, self._verifier, self._max_model_len)
        except InputError as error:
            raise InputError(f"{path}:{line}: {error}") from error
        return samples


def combined_digest(digests: Iterable[str]) -> str:
    """Which samples there are, whatever their order: the sum of their `input_digest`.

    A sum can be gone on with: the combined digests of two parts combine to that of the whole.

    Args:
        digests: hexadecimal digits, of samples (`input_digest`) or of parts (this function).

    Returns:
        The sum modulo two to the digests' bits, as hexadecimal digits.
    """
    total = sum(int(digest, 16) for digest in digests) % (1 << 8 * DIGEST_BYTES)
    return f"{total:0{2 * DIGEST_BYTES}x}"


def data_files(data: Path) -> list[Path]:
    """The files that hold a data set's rows: ``data`` itself, or the parts of a prepared folder.

    Raises:
        InputError: a folder that ``prepare`` did not finish.
    """
    if not data.is_dir():
        return [data]
    if not (data / ACCOUNT_FILE).is_file():
        raise InputError(
            f"--data {data}: a folder without {ACCOUNT_FILE}; expected one that eagle3compat "
            "prepare has finished (run it again, it goes on), or a .jsonl file"
        )
    return sorted(data.glob(PART_PATTERN))


class _DataFile:
    """One file of a data set, open for as long as its samples may be asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._stream = path.open("rb")
        except OSError as error:
            raise InputError(f"--data {path}: cannot be read ({error})") from error

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Line numbers from 1, where each line begins, and its bytes; blank lines are left out."""
        offset = 0
        try:
            for number, content in enumerate(self._stream, start=1):
                if content.strip():
                    yield number, offset, content
                offset += len(content)
        except OSError as error:
            raise InputError(f"--data {self.path}: cannot be read ({error})") from error

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; the stream's own position does not move."""
        try:
            return os.pread(self._stream.fileno(), size, offset)
        except OSError as error:
            raise InputError(f"--data {self.path}: cannot be read ({error})") from error


def parse_row(content: bytes) -> dict[str, Any]:
    """One line of a data set.

    Raises:
        InputError: it is no JSON object in UTF-8.
    """
    try:
        # Bytes alone would be guessed at: json takes them for UTF-16 where they could be.
        row = json.loads(content.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"malformed JSON ({error.msg}, column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot be read as UTF-8 ({error})") from error
    if not isinstance(row, dict):
        raise InputError(f"{type(row).__name__}, expected a JSON object")
    return row


def _samples_from(
    line: int, row: Mapping[str, Any], renderer: Callable[[], Renderer]
) -> list[Sample]:
    key = row_kind(row)
    if key == "input_ids":
        return [sample_from_token_ids(line, row)]
    rendered = renderer().render(normalize_turns(row[key]), row.get("tools"))
    return [Sample(line, sample.input_ids, sample.loss_mask) for sample in rendered]


def row_kind(row: Mapping[str, Any]) -> str:
    """Which of `ROW_KEYS` a row has.

    Raises:
        InputError: none, or several.
    """
    kinds = [key for key in ROW_KEYS if key in row]
    if len(kinds) != 1:
        found = " and ".join(kinds) if kinds else f"only {', '.join(row) or 'nothing'}"
        raise InputError(f"expected one of {', '.join(ROW_KEYS)}, found {found}")
    return kinds[0]


def sample_from_token_ids(line: int, row: Mapping[str, Any]) -> Sample:
    """The sample of a row with ``input_ids``.

    Raises:
        InputError: they are no integers, or the mask is not of 0 and 1.
    """
    input_ids = row["input_ids"]
    if not _is_integer_list(input_ids):
        raise InputError("input_ids is no list of integers")
    loss_mask = row.get("loss_mask")
    if loss_mask is None:
        return Sample(line, input_ids, [1] * len(input_ids), mask_given=False)
    if not isinstance(loss_mask, list) or any(value not in (0, 1) for value in loss_mask):
        raise InputError("loss_mask is no list of 0 and 1")
    return Sample(line, input_ids, list(map(int, loss_mask)))


def _is_integer_list(value: object) -> bool:
    # A bool is an int to isinstance, and JSON's true is no token id.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def check_sample(sample: Sample, verifier: Verifier, max_model_len: int) -> None:
    """Refuse a sample that the engine cannot take, or whose mask is of another length.

    Raises:
        InputError: what is wrong with it.
    """
    length = len(sample.input_ids)
    if not length:
        raise InputError("an empty sequence has no hidden states; take the row out")
    if len(sample.loss_mask) != length:
        raise InputError(f"loss_mask has {len(sample.loss_mask)} entries for {length} input_ids")
    if length + 1 > max_model_len:
        raise InputError(
            f"{length} tokens and the one that the engine samples exceed --max-model-len "
            f"{max_model_len}; raise it to {length + 1} or shorten the row"
        )
    last = verifier.vocab_size - 1
    for token in (min(sample.input_ids), max(sample.input_ids)):
        if not 0 <= token <= last:
            raise InputError(
                f"token id {token} is outside the vocabulary (0 to {last}); "
                "was the row made with another tokenizer?"
            )
