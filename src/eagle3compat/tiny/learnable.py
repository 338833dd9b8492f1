"""The text of the learnable tiny Kimi-K2.5: which token follows, and what it depends on.

A draft has to see the right hidden states, or it cannot tell what follows. So a token's successor
depends on the token *and* on a hidden key:

- The **text** is written in an alphabet of 64 characters that the tokenizer never merges. Each is a
  pair of a group (4 of them, which follow each other in a circle) and of a value of 4 bits.
- Every token that holds a lower-case letter is a **key token** of one of three classes, with a rank
  and a code of 4 signs. The first layer's attention picks the key token of the highest rank in each
  class, wherever in the context it stands: three raw codes. The text has no key tokens, so that a
  question sets the key of its whole answer.
- Layers 1 to 6 each show another **page**: the product, sign by sign, of two of the raw codes, one
  of them shifted. A layer overwrites the page of the layer before it.
- The successor of a token of group g is in the next group. Its bits are told by the token, but
  three of them are flipped by sign g of a page: of the pages of layers 2, 4 and 5.

Layers 2, 4 and 5 are the auxiliary layers that speculators takes by default. Each shows a page that
no other layer shows, and a draft without one of them has to guess a bit of every token. Neither the
raw codes nor the text so far are a quick way round: both would take products of three and more
signs, of which no part alone says anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.tiny.draw import Draw
from eagle3compat.tiny.vocabulary import (
    MERGED_PIECES,
    VOCABULARY_SIZE,
    marker_id,
)

GROUPS = 4
BITS = 4
KEY_CLASSES = 3

# Printable ASCII that no merge of the vocabulary and no marker begins with or needs.
ALPHABET = "".join(
    character
    for character in map(chr, range(0x21, 0x7F))
    if not character.islower() and character not in '0"[<'
)

# The words of the chat template are in every conversation: they get the lowest ranks, so that
# what the user wrote decides.
TEMPLATE_WORDS = ("user", "assistant", "system")

KEY_LAYERS = (2, 4, 5)
"""The layers whose pages flip the first bits; the last bit is not flipped."""

# For each page: the class of the first raw code, that of the second, and by how many groups the
# second is shifted.
PAGES: dict[int, tuple[int, int, int]] = {
    1: (0, 1, 1),
    2: (1, 2, 1),
    3: (2, 0, 3),
    4: (0, 1, 2),
    5: (1, 2, 3),
    6: (2, 0, 2),
}


@dataclass(frozen=True)
class TokenFeatures:
    """What each token brings along; every array has one row a token of the vocabulary.

    Attributes:
        group: int64 [tokens], which sign of the pages its successor's bits are flipped by.
        next_group: int64 [tokens], the group of its successor; -1 where the successor is fixed.
        signs: int64 [tokens, BITS] of -1 and 1: its successor's bits before they are flipped.
        key_class: int64 [tokens], -1 for a token that is no key token.
        rank: int64 [tokens], from 1; 0 for a token that is no key token.
        code: int64 [tokens, GROUPS] of -1 and 1; zeros for a token that is no key token.
        text: int64 [GROUPS, 2**BITS], the token of each group and value.
    """

    group: Any
    next_group: Any
    signs: Any
    key_class: Any
    rank: Any
    code: Any
    text: Any


def token_features(draw: Draw) -> TokenFeatures:
    """Draws the features of every token."""
    import numpy as np

    values = 2**BITS
    characters = draw.order("learnable.text", GROUPS * values).reshape(GROUPS, values)
    text = np.array([ord(character) for character in ALPHABET])[characters]

    # A token outside the text stands for one within it: what follows a prompt is text.
    stands_for = (draw.words("learnable.stand-ins", VOCABULARY_SIZE) % (GROUPS * values)).astype(
        np.int64
    )
    stands_for[text] = np.arange(GROUPS * values).reshape(GROUPS, values)
    group, value = np.divmod(stands_for, values)
    next_group = (group + 1) % GROUPS
    next_group[marker_id("<think>")] = -1

    key_class: Any = np.full(VOCABULARY_SIZE, -1)
    rank: Any = np.zeros(VOCABULARY_SIZE, dtype=np.int64)
    code: Any = np.zeros((VOCABULARY_SIZE, GROUPS), dtype=np.int64)
    keys = _key_tokens(draw)
    places = np.arange(len(keys))
    key_class[keys], rank[keys] = places % KEY_CLASSES, places // KEY_CLASSES + 1
    # Each class goes through all codes from rank to rank: no sign, and no product of signs, is
    # likelier than its opposite.
    for a_class in range(KEY_CLASSES):
        codes = draw.order(f"learnable.codes.{a_class}", 2**GROUPS)
        members = keys[a_class::KEY_CLASSES]
        code[members] = 1 - 2 * _bits(codes[np.arange(len(members)) % len(codes)], GROUPS)
    return TokenFeatures(
        group, next_group, 1 - 2 * _bits(_turned(value), BITS), key_class, rank, code, text
    )


def _key_tokens(draw: Draw) -> list[int]:
    """Key tokens, from the lowest rank to the highest."""
    texts = [chr(code) for code in range(0x80)] + [""] * 0x80 + list(MERGED_PIECES)
    keys = [token for token, text in enumerate(texts) if any(map(str.islower, text))]
    shuffled = [keys[place] for place in draw.order("learnable.keys", len(keys))]
    in_template = {token: any(texts[token] in word for word in TEMPLATE_WORDS) for token in keys}
    return sorted(shuffled, key=lambda token: not in_template[token])


def _turned(value: Any) -> Any:
    """The value times x modulo x⁴ + x + 1: all fifteen values but 0 follow each other.

    With flips between them, 15 of 16 texts come back to their first token after 60 tokens only.
    """
    doubled = value << 1
    return doubled ^ ((doubled >> BITS) * 0b10011)


def _bits(values: Any, count: int) -> Any:
    """The lowest bits of each value, lowest first: an int64 array [values, count]."""
    import numpy as np

    values = np.asarray(values)[:, None]
    return ((values >> np.arange(count, dtype=values.dtype)) & 1).astype(np.int64)


def continue_text(prompt: Sequence[int], count: int, *, seed: int = 0) -> list[int]:
    """The tokens that the learnable variant writes greedily, told from the rules alone.

    Args:
        prompt: token ids; key tokens of all three classes among them, which a chat template's own
            words are.
        count: how many tokens to write.
        seed: of the checkpoint.

    Returns:
        `count` token ids.

    Raises:
        InputError: the prompt is empty, sets no whole key, or has an id outside the vocabulary.
    """
    features = token_features(Draw(seed))
    for token in prompt:
        if not 0 <= token < VOCABULARY_SIZE:
            raise InputError(
                f"token id {token}: expected 0 to {VOCABULARY_SIZE - 1}. "
                "The prompt was made with another tokenizer."
            )
    pages = _pages_of(features, prompt)
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_successor(features, pages, tokens[-1]))
    return tokens[len(prompt) :]


def _pages_of(features: TokenFeatures, prompt: Sequence[int]) -> list[Any]:
    """The pages that flip the bits, each [GROUPS] of -1 and 1."""
    import numpy as np

    raw = []
    for key_class in range(KEY_CLASSES):
        keys = [token for token in prompt if features.key_class[token] == key_class]
        if not keys:
            raise InputError(
                f"prompt: expected key tokens (lower-case letters) of {KEY_CLASSES} classes, found "
                f"none of class {key_class}. Use the chat template."
            )
        raw.append(features.code[max(keys, key=lambda token: features.rank[token])])
    return [
        raw[first] * np.roll(raw[second], -shift)
        for first, second, shift in (PAGES[layer] for layer in KEY_LAYERS)
    ]


def _successor(features: TokenFeatures, pages: Sequence[Any], token: int) -> int:
    if features.next_group[token] < 0:
        return marker_id("</think>")
    group = features.group[token]
    signs = list(features.signs[token])
    for bit, page in enumerate(pages):
        signs[bit] *= page[group]
    value = sum(1 << bit for bit, sign in enumerate(signs) if sign < 0)
    return int(features.text[features.next_group[token], value])


assert len(ALPHABET) == GROUPS * 2**BITS
