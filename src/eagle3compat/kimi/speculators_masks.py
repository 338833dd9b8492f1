"""speculators' own preprocessing of conversations, where it can be relied upon.

speculators 0.3 and 0.4 find what an assistant says by a regular expression over the rendered text
and the offsets of its tokens (``data_generation/preprocessing.py``), or by the template's own mask.
It fails without offsets, leaves out tool turns and the thinking, and passes over the turns that a
template renders unlike the last. So it is asked only about plain conversations, and only when it
agrees with `Renderer` on a few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import pairwise
from types import ModuleType
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.conversations import Rendered, Renderer

# Longer than any conversation: cutting is ours to do, and to count.
NEVER_CUT = 1 << 30

PLAIN_ROLES = ("system", "user", "assistant")
PLAIN_KEYS = {"role", "content"}

TRIALS: tuple[tuple[str, ...], ...] = (
    ("What is 2 and 2?", "4"),
    ("Name a fruit.", "Apple 🍎", "Another, please.", " Pear\n\nor quince"),
    ("你好", "你好!", "And 3 more?", "7, since 4 and 3 is 7."),
)


class SpeculatorsMasks:
    """Renders plain conversations as the installed speculators does.

    Args:
        module: ``speculators.data_generation.preprocessing``.
        tokenizer: a fast one.
    """

    def __init__(self, module: ModuleType, tokenizer: Any) -> None:
        self._module = module
        self._tokenizer = tokenizer
        supports = getattr(module, "_supports_assistant_mask", None)
        has_mask = supports is not None and supports(tokenizer)
        self._pattern = None if has_mask else module._detect_assistant_pattern(tokenizer)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Rendered | None:
        """A conversation as one sample, or None where speculators cannot be relied upon for it.

        Args:
            messages: from `eagle3compat.kimi.conversations.normalize_turns`.
        """
        if not _is_plain(messages):
            return None
        turns = [dict(message) for message in messages]
        found = self._module._preprocess_batch(
            {"conversations": [turns]}, self._tokenizer, NEVER_CUT, self._pattern
        )
        if len(found["input_ids"]) != 1:
            return None
        input_ids = [int(token) for token in found["input_ids"][0]]
        loss_mask = [int(marked) for marked in found["loss_mask"][0]]
        numbers = [i for i, turn in enumerate(turns, 1) if turn["role"] == "assistant"]
        runs = sum(after > before for before, after in pairwise([0, *loss_mask]))
        if runs != len(numbers) or len(input_ids) != len(loss_mask):
            return None
        return Rendered(input_ids, loss_mask, tuple(numbers))


def find_speculators_masks(renderer: Renderer) -> tuple[SpeculatorsMasks | None, str]:
    """speculators' preprocessing, if it can be relied upon with this tokenizer and template.

    Args:
        renderer: ours, with the tokenizer.

    Returns:
        It or None, and the reason in words.
    """
    if not renderer.has_offsets:
        return None, "the tokenizer is a Python one, without the offsets that speculators needs"
    try:
        from speculators.data_generation import preprocessing
    except Exception as error:  # noqa: BLE001 - importing it runs much foreign code
        return None, f"speculators' preprocessing cannot be imported ({error!r})"
    parameters = [*signature(preprocessing._preprocess_batch).parameters][:4]
    if parameters != ["examples", "tokenizer", "max_length", "assistant_pattern"]:
        return None, f"speculators' preprocessing takes {parameters}, which is not known here"
    try:
        masks = SpeculatorsMasks(preprocessing, renderer.tokenizer)
    except (ValueError, AssertionError) as error:
        return None, f"speculators finds no assistant turns with this chat template ({error})"
    for trial in TRIALS:
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(trial)]
        if [masks.render(turns)] != _ours(renderer, turns):
            return None, (
                "with this chat template speculators renders or marks conversations unlike what "
                f"the engine would see, as in {trial!r}"
            )
    return masks, "speculators and eagle3compat agree on every trial"


def _ours(renderer: Renderer, turns: list[dict[str, str]]) -> list[Rendered]:
    try:
        return renderer.render(turns)
    except InputError:
        return []


def _is_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is nothing in it that speculators would pass over."""
    roles = [message["role"] for message in messages]
    return (
        all(set(message) == PLAIN_KEYS for message in messages)
        and all(role in PLAIN_ROLES for role in roles)
        and all(message["content"].strip() for message in messages)
        and not any("<think>" in message["content"] for message in messages)
        and roles[0] != "assistant"
        and roles[-1] == "assistant"
    )
