"""A conversation as token ids and a loss mask, through the checkpoint's own chat template.

The mask is found by rendering: the conversation up to an assistant turn, with the prompt that asks
for it, must be a prefix of the conversation with that turn, and that one of the whole. What the
turn adds after the prompt is what the draft learns to predict. A template that rewrites earlier
turns has no such prefixes, and the conversation is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


def load_tokenizer(model: Path) -> Any:
    """The checkpoint's tokenizer, trusting the remote code of the folder that the user named.

    Raises:
        InputError: there is none that can be loaded, or it has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise InputError(f"--model {model}: its tokenizer cannot be loaded ({error})") from error
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"--model {model}: its tokenizer has no chat template, so conversations cannot be "
            "rendered; give rows of token ids (input_ids, loss_mask)"
        )
    return tokenizer


def normalize_turns(turns: object) -> list[dict[str, Any]]:
    """Bring ShareGPT turns (from, value) and chat messages (role, content) to one form.

    Returns:
        Messages with ``role`` and ``content``; other keys of a turn (tool calls, …) are kept.

    Raises:
        InputError: a turn that is neither, or one whose content is not text.
    """
    if not isinstance(turns, list) or not turns:
        raise InputError("a conversation is a list of turns, and not an empty one")
    return [_normalize_turn(number, turn) for number, turn in enumerate(turns, start=1)]


def _normalize_turn(number: int, turn: object) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise InputError(f"turn {number} is {type(turn).__name__}, expected an object")
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(f"turn {number} has role {role!r}, expected one of {', '.join(ROLES)}")
    if content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise InputError(f"turn {number} has content of {type(content).__name__}, expected text")
    rest = {key: turn[key] for key in turn if key not in ("role", "from", "content", "value")}
    return {"role": ROLES[role], "content": content, **rest}


def render_conversation(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: object = None
) -> tuple[list[int], list[int]]:
    """Render a conversation and mark what its assistant turns add.

    Args:
        tokenizer: of the checkpoint; its ``apply_chat_template`` is used.
        messages: from `normalize_turns`.
        tools: passed to the template as it is.

    Returns:
        Token ids and a loss mask of the same length: 1 for an assistant turn's content and its end
        marker, 0 elsewhere.

    Raises:
        InputError: no assistant turn, or a template whose prefixes are not stable.
    """

    def render(count: int, *, asks: bool) -> list[int]:
        return _render(tokenizer, messages[:count], tools, add_generation_prompt=asks)

    whole = render(len(messages), asks=False)
    mask = [0] * len(whole)
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(position, asks=True)
        turn = render(position + 1, asks=False)
        if turn[: len(prompt)] != prompt or whole[: len(turn)] != turn:
            raise InputError(
                f"turn {position + 1}: the chat template renders it differently with the turns "
                "around it, so its loss mask cannot be told; give this row as token ids "
                "(input_ids, loss_mask)"
            )
        mask[len(prompt) : len(turn)] = [1] * (len(turn) - len(prompt))
    if not any(mask):
        raise InputError("no assistant turn, so there is nothing for a draft to learn")
    return whole, mask


def _render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: object,
    *,
    add_generation_prompt: bool,
) -> list[int]:
    from jinja2 import TemplateError

    try:
        tokens = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            tokenize=True,
            add_generation_prompt=add_generation_prompt,
            return_dict=False,
        )
    except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
        raise InputError(
            f"the chat template cannot render the first {len(messages)} turns ({error})"
        ) from error
    return [int(token) for token in tokens]
