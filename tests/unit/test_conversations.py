"""Conversations as token ids and loss masks, through chat templates of several habits."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3compat.errors import InputError
from eagle3compat.kimi.conversations import normalize_turns, render_conversation

jinja2 = pytest.importorskip("jinja2")

KIMI_LIKE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Rewrites turns once they are history, as templates that drop earlier reasoning do.
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PICKY = "{{ raise_exception('no') if messages[0].role != 'user' }}" + KIMI_LIKE


class CharacterTokenizer:
    """Renders a template as transformers does, one token a character."""

    def __init__(self, template: str) -> None:
        self.template = jinja2.Environment().from_string(template)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tools: Any, add_generation_prompt: bool, **_: Any
    ) -> list[int]:
        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        text = self.template.render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            raise_exception=raise_exception,
        )
        return [ord(character) for character in text]


def masked_and_whole(template: str, *turns: tuple[str, str]) -> tuple[str, str]:
    messages = normalize_turns([{"role": role, "content": content} for role, content in turns])
    tokens, mask = render_conversation(CharacterTokenizer(template), messages)
    assert len(tokens) == len(mask)
    masked = "".join(chr(token) for token, kept in zip(tokens, mask, strict=True) if kept)
    return masked, "".join(map(chr, tokens))


def test_the_mask_marks_assistant_content_and_its_end_marker_alone() -> None:
    masked, whole = masked_and_whole(
        KIMI_LIKE,
        ("system", "S"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "hi"),
        ("assistant", "hi"),
        ("user", "bye"),
    )
    assert masked == "hello|hi|"
    assert whole == "<system>S|<user>hi|<assistant>hello|<user>hi|<assistant>hi|<user>bye|"


def test_a_conversation_may_start_with_the_assistant() -> None:
    assert masked_and_whole(KIMI_LIKE, ("assistant", "hello"))[0] == "hello|"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    turns = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert masked_and_whole(FORGETFUL, *turns[:2])[0] == "b|"
    with pytest.raises(InputError, match="turn 2: the chat template renders it differently"):
        masked_and_whole(FORGETFUL, *turns)


def test_a_template_that_raises_is_refused_with_its_message() -> None:
    with pytest.raises(InputError, match="cannot render"):
        masked_and_whole(PICKY, ("system", "S"), ("assistant", "b"))


def test_a_conversation_without_assistant_turns_is_refused() -> None:
    with pytest.raises(InputError, match="no assistant turn"):
        masked_and_whole(KIMI_LIKE, ("user", "hi"))


def test_sharegpt_turns_and_chat_messages_become_the_same() -> None:
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert normalize_turns(sharegpt) == normalize_turns(messages) == messages


def test_tool_calls_stay_with_their_turn() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert normalize_turns([turn]) == [{**turn, "content": ""}]


@pytest.mark.parametrize(
    ("turns", "fault"),
    [
        ([], "not an empty one"),
        ("text", "list of turns"),
        (["text"], "turn 1 is str"),
        ([{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}], "turn 2 has role"),
        ([{"content": "a"}], "role None"),
        ([{"role": "user", "content": None}], "content of NoneType"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of list"),
    ],
)
def test_turns_that_are_not_text_of_a_known_role_are_refused(turns: object, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        normalize_turns(turns)
