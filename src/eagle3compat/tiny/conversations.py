"""Conversations with the learnable tiny Kimi-K2.5: questions, and the answers it writes itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.tiny.draw import Draw
from eagle3compat.tiny.learnable import (
    KEY_CLASSES,
    STREAM_STEP,
    continue_text,
    key_texts,
)

STREAM_LENGTH = 12
FILLERS = "23456789"
"""Digits that no merge begins with."""
LONGEST_ANSWER = STREAM_LENGTH * STREAM_STEP


def learnable_conversations(
    tokenizer: Any, count: int, *, answer_tokens: int = 48, seed: int = 0, model_seed: int = 0
) -> list[dict[str, Any]]:
    """Questions with the answers that the learnable variant gives greedily.

    The answers are told from the rules (`continue_text`), so that no model has to be loaded.

    Args:
        tokenizer: of the checkpoint, from `eagle3compat.kimi.conversations.load_tokenizer`.
        count: how many conversations.
        answer_tokens: tokens of each answer, its thinking not counted; at most `LONGEST_ANSWER`.
        seed: which questions; another seed gives others.
        model_seed: the checkpoint's seed.

    Returns:
        Rows of a data set of conversations: ``{"messages": [question, answer]}``.

    Raises:
        InputError: `count` or `answer_tokens` is out of range.
    """
    if count < 1:
        raise InputError(f"conversations: expected 1 or more, found {count}.")
    if not 1 <= answer_tokens <= LONGEST_ANSWER:
        raise InputError(
            f"answer tokens: expected 1 to {LONGEST_ANSWER}, found {answer_tokens}. Longer answers "
            "outlast the stream of keys in the question."
        )
    draw = Draw(seed)
    rows: list[dict[str, Any]] = []
    classes = [_spellings(Draw(model_seed), key_class) for key_class in range(KEY_CLASSES)]
    for number in range(count):
        question = {"role": "user", "content": _question(tokenizer, draw, number, classes)}
        prompt = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_dict=False
        )
        _, *answer = continue_text(
            [int(token) for token in prompt], 1 + answer_tokens, seed=model_seed
        )
        text = "".join(map(chr, answer))
        rows.append({"messages": [question, {"role": "assistant", "content": text}]})
    return rows


def _question(tokenizer: Any, draw: Draw, number: int, classes: Sequence[Sequence[str]]) -> str:
    """A stream: again and again a key token of each class, and a digit."""
    question = ""
    attempt = 0
    while len(tokenizer.encode(question)) < STREAM_LENGTH * STREAM_STEP:
        words = [int(word) for word in draw.words(f"question.{number}.{attempt}", STREAM_STEP)]
        attempt += 1
        pieces = [
            members[word % len(members)]
            for word, members in zip(words, (*classes, FILLERS), strict=True)
        ]
        # Beside each other some tokens would merge.
        apart = [token for piece in pieces for token in tokenizer.encode(piece)]
        if tokenizer.encode("".join(pieces)) == apart:
            question += "".join(pieces)
    return question


def _spellings(draw: Draw, key_class: int) -> list[str]:
    """Texts of key tokens that stay what they are beside other text."""
    return [text for text in key_texts(draw, key_class) if text.isalpha()]
