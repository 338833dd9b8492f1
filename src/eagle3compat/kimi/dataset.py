"""Reading a ``.jsonl`` data set: rows of token ids, or conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.conversations import (
    load_tokenizer,
    normalize_turns,
    render_conversation,
)
from eagle3compat.kimi.verifier import Verifier

ROW_KEYS = ("input_ids", "messages", "conversations")


@dataclass(frozen=True)
class Sample:
    """One sequence to extract.

    Attributes:
        line: where it stands in the data file, from 1.
        input_ids: token ids, at least one.
        loss_mask: 0 or 1 for each token; 1 where a draft learns to predict it.
        mask_given: False where the row had token ids without a mask, which then is all ones.
    """

    line: int
    input_ids: list[int]
    loss_mask: list[int]
    mask_given: bool = True


def read_samples(data: Path, verifier: Verifier, max_model_len: int) -> list[Sample]:
    """Read and check every row; nothing is ever cut or dropped.

    A row has ``input_ids`` (and ``loss_mask``; without it, every token counts), or ``messages``, or
    ``conversations``. Other keys are ignored, but ``tools`` goes to the chat template. Blank lines
    are passed over.

    Args:
        data: a file with one JSON object a line, in UTF-8.
        verifier: whose vocabulary bounds the token ids and whose chat template renders.
        max_model_len: a sequence and the one token that the engine samples must fit in it.

    Raises:
        InputError: naming the file and the line.
    """
    tokenizer = cache(lambda: load_tokenizer(verifier.path))
    samples = []
    for line, row in _read_rows(data):
        try:
            sample = _sample_from(line, row, tokenizer)
            _check_sample(sample, verifier, max_model_len)
        except InputError as error:
            raise InputError(f"{data}:{line}: {error}") from error
        samples.append(sample)
    if not samples:
        raise InputError(f"--data {data}: holds no rows")
    return samples


def _read_rows(data: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with data.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _parse(data, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--data {data}: cannot be read ({error})") from error


def _parse(data: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{data}:{number}: malformed JSON ({error.msg}, column {error.colno})"
        ) from error
    if not isinstance(row, dict):
        raise InputError(f"{data}:{number}: {type(row).__name__}, expected a JSON object")
    return row


def _sample_from(line: int, row: Mapping[str, Any], tokenizer: Callable[[], Any]) -> Sample:
    kinds = [key for key in ROW_KEYS if key in row]
    if len(kinds) != 1:
        found = " and ".join(kinds) if kinds else f"only {', '.join(row) or 'nothing'}"
        raise InputError(f"expected one of {', '.join(ROW_KEYS)}, found {found}")
    if kinds[0] == "input_ids":
        return _sample_from_token_ids(line, row)
    messages = normalize_turns(row[kinds[0]])
    input_ids, loss_mask = render_conversation(tokenizer(), messages, row.get("tools"))
    return Sample(line, input_ids, loss_mask)


def _sample_from_token_ids(line: int, row: Mapping[str, Any]) -> Sample:
    input_ids = row["input_ids"]
    if not _is_integer_list(input_ids):
        raise InputError("input_ids is no list of integers")
    loss_mask = row.get("loss_mask")
    if loss_mask is None:
        return Sample(line, input_ids, [1] * len(input_ids), mask_given=False)
    if not isinstance(loss_mask, list) or any(value not in (0, 1) for value in loss_mask):
        raise InputError("loss_mask is no list of 0 and 1")
    return Sample(line, input_ids, [int(value) for value in loss_mask])


def _is_integer_list(value: object) -> bool:
    # A bool is an int to isinstance, and JSON's true is no token id.
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_sample(sample: Sample, verifier: Verifier, max_model_len: int) -> None:
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
    outside = [token for token in sample.input_ids if not 0 <= token < verifier.vocab_size]
    if outside:
        raise InputError(
            f"token id {outside[0]} is outside the vocabulary (0 to {verifier.vocab_size - 1}); "
            "was the row made with another tokenizer?"
        )
