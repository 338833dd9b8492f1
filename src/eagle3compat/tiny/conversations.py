"""Conversations with the learnable tiny Kimi-K2.5: questions, and the answers it writes itself."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.tiny.draw import Draw
from eagle3compat.tiny.learnable import BITS, GROUPS, continue_text
from eagle3compat.tiny.vocabulary import MERGED_PIECES

PIECES = (*ascii_lowercase, *(piece for piece in MERGED_PIECES if piece.isalpha()))

# After 60 tokens an answer comes round, and could be learnt by copying.
LONGEST_ANSWER = GROUPS * (2**BITS - 1)


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
            "repeat themselves."
        )
    draw = Draw(seed)
    rows: list[dict[str, Any]] = []
    number = 0
    while len(rows) < count:
        question = {"role": "user", "content": _question(draw, number)}
        number += 1
        prompt = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_dict=False
        )
        _, *answer = continue_text(
            [int(token) for token in prompt], 1 + answer_tokens, seed=model_seed
        )
        # One question in 16 has an answer that runs in a circle of four tokens.
        if len(set(answer)) == answer_tokens:
            text = "".join(map(chr, answer))
            rows.append({"messages": [question, {"role": "assistant", "content": text}]})
    return rows


def _question(draw: Draw, number: int) -> str:
    """Two made-up words of few pieces, so that every key is about as likely as any other."""
    drawn = draw.words(f"question.{number}", 4)
    pieces = [PIECES[int(word) % len(PIECES)] for word in drawn]
    return f"{pieces[0]}{pieces[1]} {pieces[2]}{pieces[3]}?"
