"""The text of the learnable tiny Kimi-K2.5: which token follows, and what it depends on.

A draft has to see the right hidden states, or it cannot tell what follows. So a token's successor
depends on the token *and* on a hidden key:

- The **text** is written in an alphabet of 64 characters that the tokenizer never merges. Each is a
  pair of a group (4 of them, which follow each other in a circle) and of a value of 4 bits.
- The key is three **raw codes** of 4 signs each, which the first layer's attention gathers from
  **key tokens**, those that hold a lower-case letter. They are of three classes, and of each class
  the one counts that stands about 60 tokens back. A question holds a **stream** of them, one of
  each class in four tokens: as the answer goes on, the key turns each four tokens.
- Layers 1 to 6 each show another **page**: the product, sign by sign, of two of the raw codes, one
  of them shifted. A layer overwrites the page of the layer before it.
- The successor of a token of group g is in the next group. Three of its bits are sign g of a page:
  of the pages of layers 2, 4 and 5. The last bit is told by the token.

Layers 2, 4 and 5 are the auxiliary layers that speculators takes by default. Each shows a page that
no other layer shows, and a draft without one of them has to guess a bit of every token. The raw
codes are no quick way round: that would take products of signs, of which no part alone says
anything. Nor is the text so far: the key has turned before a group comes again.

When the key turns no draft can tell what follows, since its page is not yet shown. A verifier that
is given three tokens at a time writes that one itself, and the next three can be told again: at
best each step yields four tokens.
"""

from __future__ import annotations

import math
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
"""The layers whose pages tell the first bits; the token tells the last bit."""

# For each page: the class of the first raw code, that of the second, and by how many groups the
# second is shifted.
PAGES: dict[int, tuple[int, int, int]] = {
    1: (0, 2, 1),
    2: (1, 2, 1),
    3: (0, 1, 3),
    4: (0, 2, 2),
    5: (1, 2, 0),
    6: (0, 1, 1),
}

STREAM_RANK = 200
"""Above what any rank of the template's words and any distance makes up for."""
STREAM_STEP = GROUPS
"""Tokens from one of a stream to the next."""

ROTARY_SIZE, ROTARY_BASE = 64, 50_000.0


@dataclass(frozen=True)
class Wave:
    """The attention to a stream: a cosine of the distance.

    Args:
        pair: of rotary coordinates, which sets how fast it turns.
        peak: tokens back where it is highest.
        nats: its amplitude.
    """

    pair: int
    peak: float
    nats: float

    @property
    def turn(self) -> float:
        """Radians from token to token."""
        return math.exp(-2 * self.pair / ROTARY_SIZE * math.log(ROTARY_BASE))

    def at(self, distance: int) -> float:
        """Nats at a distance in tokens."""
        return self.nats * math.cos(self.turn * (distance - self.peak))


# The template has 11 tokens between a stream of 48 and the answer. Half a turn is 66 tokens: of a
# stream that began farther back than 126 tokens another token counts. In a stream the classes
# stand one after the other.
WAVES = tuple(Wave(pair=9, peak=60.5 - key_class, nats=2200.0) for key_class in range(KEY_CLASSES))


@dataclass(frozen=True)
class TokenFeatures:
    """What each token brings along; every array has one row a token of the vocabulary.

    Attributes:
        group: int64 [tokens], which sign of the pages its successor's bits are.
        next_group: int64 [tokens], the group of its successor; -1 where the successor is fixed.
        signs: int64 [tokens, BITS] of -1 and 1: by what a page's sign is multiplied (1), and the
            sign of the last bit.
        key_class: int64 [tokens], -1 for a token that is no key token.
        rank: int64 [tokens], from 1; 0 for a token that is no key token.
        stream: bool [tokens].
        code: int64 [tokens, GROUPS] of -1 and 1; zeros for a token that is no key token.
        text: int64 [GROUPS, 2**BITS], the token of each group and value.
    """

    group: Any
    next_group: Any
    signs: Any
    key_class: Any
    rank: Any
    stream: Any
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
    texts = _token_texts()
    stream: Any = np.zeros(VOCABULARY_SIZE, dtype=bool)
    stream[[token for token in keys if not _in_template(texts[token])]] = True
    rank[stream] = STREAM_RANK
    signs = 1 - 2 * _bits(_turned(value), BITS)
    signs[:, : len(KEY_LAYERS)] = 1
    return TokenFeatures(group, next_group, signs, key_class, rank, stream, code, text)


def key_texts(draw: Draw, key_class: int) -> list[str]:
    """The texts of a class's key tokens that no word of the template holds, rising in rank."""
    texts = _token_texts()
    members = _key_tokens(draw)[key_class::KEY_CLASSES]
    return [texts[token] for token in members if not _in_template(texts[token])]


def _key_tokens(draw: Draw) -> list[int]:
    """Key tokens, from the lowest rank to the highest."""
    texts = _token_texts()
    keys = [token for token, text in enumerate(texts) if any(map(str.islower, text))]
    shuffled = [keys[place] for place in draw.order("learnable.keys", len(keys))]
    return sorted(shuffled, key=lambda token: not _in_template(texts[token]))


def _token_texts() -> list[str]:
    """The text of each token that is no special one; empty where it is a part of a character."""
    return [chr(code) for code in range(0x80)] + [""] * 0x80 + list(MERGED_PIECES)


def _in_template(text: str) -> bool:
    return any(text in word for word in TEMPLATE_WORDS)


def _turned(value: Any) -> Any:
    """The value times x modulo x⁴ + x + 1: all fifteen values but 0 follow each other."""
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
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_successor(features, _pages(_raw_codes(features, tokens)), tokens[-1]))
    return tokens[len(prompt) :]


def _raw_codes(features: TokenFeatures, tokens: Sequence[int]) -> list[Any]:
    """For each class the code that attention gathers at the last token: [GROUPS] of -1 and 1."""
    return [_raw_code(features, tokens, key_class) for key_class in range(KEY_CLASSES)]


def _raw_code(features: TokenFeatures, tokens: Sequence[int], key_class: int) -> Any:
    wave, last = WAVES[key_class], len(tokens) - 1
    keys = [
        (features.rank[token], wave.at(last - place) if features.stream[token] else 0.0, token)
        for place, token in enumerate(tokens)
        if features.key_class[token] == key_class
    ]
    if not keys:
        raise InputError(
            f"prompt: expected key tokens (lower-case letters) of {KEY_CLASSES} classes, found "
            f"none of class {key_class}. Use the chat template."
        )
    return features.code[max(keys)[2]]


def _pages(raw: Sequence[Any]) -> list[Any]:
    """The pages that tell the bits, each [GROUPS] of -1 and 1."""
    import numpy as np

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
