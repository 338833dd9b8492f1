"""The tokens of the tiny Kimi-K2.5: bytes, a few merges, and Kimi's chat markers.

The real vocabulary is a byte-level BPE of 163,584 ranks followed by 256 special tokens. Here the
ranks are the 256 bytes and some common English pieces, and 64 special tokens follow, each chat
marker as far from the first one as in the real vocabulary; ``[UNK]`` and ``[PAD]`` end both.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

# Every piece is the join of two tokens before it, so that byte-pair encoding can reach it. Text
# outside this list (Chinese, emoji, …) falls apart into bytes, as rare text does with the real
# vocabulary: one such token is no text on its own.
MERGED_PIECES: tuple[str, ...] = (
    *("th", "the", " the", "in", "an", "and", " and", "er", "on", "re", "ing", "ou", "en", "es"),
    *("at", "or", "is", " is", "al", "ll", "st", " a", " t", " to", " w", " wh", "ati", "ation"),
    *("of", " of", "you", " you", " in", " c", " s", "le", "ve", "ar", "it", " it", "om", "ro"),
    *("hi", "lo", "us", "ed", "el", "ello", "ge", "get", "ki", "mi", "kimi", ", ", ". ", "?\n"),
    *("  ", "    ", "\n\n", "00", "10", '":', '{"', '"}'),
)

FIRST_SPECIAL_TOKEN = 256 + len(MERGED_PIECES)
SPECIAL_TOKEN_COUNT = 64
VOCABULARY_SIZE = FIRST_SPECIAL_TOKEN + SPECIAL_TOKEN_COUNT


@dataclass(frozen=True)
class Marker:
    """A special token: its distance from the first special token, and whether decoding skips it."""

    offset: int
    skipped: bool = True


MARKERS: dict[str, Marker] = {
    "[BOS]": Marker(0),
    "[EOS]": Marker(1),
    "<|im_end|>": Marker(2),
    "<|im_user|>": Marker(3),
    "<|im_assistant|>": Marker(4),
    "<|start_header_id|>": Marker(6),
    "<|end_header_id|>": Marker(7),
    "[EOT]": Marker(9),
    "<|im_system|>": Marker(10),
    "<|tool_calls_section_begin|>": Marker(11, skipped=False),
    "<|tool_calls_section_end|>": Marker(12, skipped=False),
    "<|tool_call_begin|>": Marker(13, skipped=False),
    "<|tool_call_argument_begin|>": Marker(14, skipped=False),
    "<|tool_call_end|>": Marker(15, skipped=False),
    "<|im_middle|>": Marker(17),
    "<|media_begin|>": Marker(18),
    "<|media_content|>": Marker(19),
    "<|media_end|>": Marker(20),
    "<|media_pad|>": Marker(21),
    "<think>": Marker(22, skipped=False),
    "</think>": Marker(23, skipped=False),
    "[UNK]": Marker(SPECIAL_TOKEN_COUNT - 2),
    "[PAD]": Marker(SPECIAL_TOKEN_COUNT - 1),
}


def marker_id(marker: str) -> int:
    """The token id of one of `MARKERS`."""
    return FIRST_SPECIAL_TOKEN + MARKERS[marker].offset


def tiktoken_ranks() -> str:
    """The text of ``tiktoken.model``: on each line a token's bytes in base64, and its rank."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += [piece.encode() for piece in MERGED_PIECES]
    return "".join(
        f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)
    )
