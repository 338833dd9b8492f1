"""Conversations as token ids and loss masks, through chat templates of several habits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from chat_templates import (
    CHATML,
    KIMI,
    PICKY,
    PLAIN,
    QWEN3,
    RAVING,
    TWO_ENDS,
    CharacterTokenizer,
    PairTokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3compat.errors import InputError
from eagle3compat.kimi.conversations import (
    FIRST_TURN,
    SEVERAL_SAMPLES,
    THOUGHT_LOST,
    TURNS_AFTER,
    Rendered,
    Renderer,
    normalize_turns,
)

pytest.importorskip("jinja2")


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, thought: str | None = None, **rest: Any) -> dict[str, Any]:
    turn = {"role": "assistant", "content": content, **rest}
    return turn if thought is None else {**turn, "reasoning_content": thought}


def call(number: int) -> dict[str, Any]:
    return {"id": f"functions.f:{number}", "function": {"name": "f", "arguments": '{"x": 1}'}}


def tool(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"functions.f:{number}", "content": content}


def render(template: str, *turns: dict[str, Any], tools: object = None) -> list[Rendered]:
    return Renderer(CharacterTokenizer(template)).render(normalize_turns(list(turns)), tools)


def shown(sample: Rendered) -> str:
    """The sample's text, with what the mask marks in double brackets."""
    assert len(sample.input_ids) == len(sample.loss_mask)
    text, before = "", 0
    for token, marked in zip(sample.input_ids, sample.loss_mask, strict=True):
        text += ("", "[[")[marked > before] + ("", "]]")[marked < before] + chr(token)
        before = marked
    return text + ("]]" if before else "")


def texts(template: str, *turns: dict[str, Any]) -> list[str]:
    return [shown(sample) for sample in render(template, *turns)]


def test_the_mask_marks_what_assistant_turns_add_without_their_end_markers() -> None:
    system = {"role": "system", "content": "S"}
    turns = (system, user("hi"), assistant("hello"), user("hi"), assistant("hi"))
    assert texts(PLAIN, *turns) == [
        "<system>S|<user>hi|<assistant>[[hello]]|<user>hi|<assistant>[[hi]]|"
    ]
    assert texts(CHATML, *turns[1:3]) == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[hello]]<|im_end|>\n"
    ]


def test_turns_after_the_last_answer_are_left_out_and_it_is_said() -> None:
    (sample,) = render(PLAIN, user("a"), assistant("b"), user("c"))
    assert shown(sample) == "<user>a|<assistant>[[b]]|"
    assert sample.notes == (TURNS_AFTER,)


def test_an_assistant_turn_that_nothing_asks_for_is_not_marked_and_it_is_said() -> None:
    (sample,) = render(PLAIN, assistant("a"), user("b"), assistant("c"))
    assert shown(sample) == "<assistant>a|<user>b|<assistant>[[c]]|"
    assert sample.notes == (FIRST_TURN,)


def test_kimi_without_thinking_is_one_sample_whose_prompts_are_those_of_instant_mode() -> None:
    (sample,) = render(KIMI, user("a"), assistant("b"), user("c"), assistant("d"))
    assert shown(sample) == (
        "<|im_user|>user<|im_middle|>a<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>[[b]]<|im_end|>"
        "<|im_user|>user<|im_middle|>c<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>[[d]]<|im_end|>"
    )
    assert (sample.turns, sample.notes) == ((2, 4), ())


def test_kimi_with_thinking_is_a_sample_an_answer_as_the_engine_sees_it() -> None:
    first, second = render(KIMI, user("a"), assistant("b", "B"), user("c"), assistant("d", "D"))
    head = "<|im_user|>user<|im_middle|>a<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    assert shown(first) == head + "[[B</think>b]]<|im_end|>"
    assert shown(second) == (
        head + "</think>b<|im_end|><|im_user|>user<|im_middle|>c<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>[[D</think>d]]<|im_end|>"
    )
    assert (first.turns, second.turns) == ((2,), (4,))
    assert first.notes == second.notes == (SEVERAL_SAMPLES,)


def test_kimi_keeps_the_thinking_of_a_tool_loop_and_its_final_answer_in_one_sample() -> None:
    (sample,) = render(
        KIMI,
        user("a"),
        assistant("", "one", tool_calls=[call(0)]),
        tool(0, "r0"),
        assistant("so", "two", tool_calls=[call(1), call(2)]),
        tool(1, "r1"),
        tool(2, "r2"),
        assistant("d", "three"),
    )

    def calls(*numbers: int) -> str:
        each = (
            f"<|tool_call_begin|>functions.f:{number}<|tool_call_argument_begin|>"
            '{"x": 1}<|tool_call_end|>'
            for number in numbers
        )
        return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"

    def result(number: int) -> str:
        return (
            f"<|im_system|>tool<|im_middle|>## Return of functions.f:{number}\nr{number}<|im_end|>"
        )

    asked = "<|im_assistant|>assistant<|im_middle|><think>"
    assert shown(sample) == (
        f"<|im_user|>user<|im_middle|>a<|im_end|>{asked}[[one</think>{calls(0)}]]<|im_end|>"
        f"{result(0)}{asked}[[two</think>so{calls(1, 2)}]]<|im_end|>"
        f"{result(1)}{result(2)}{asked}[[three</think>d]]<|im_end|>"
    )
    assert sample.turns == (2, 4, 7)


def test_calls_are_marked_as_written_and_are_history_as_vllm_renders_it() -> None:
    compact = call(0)
    compact["function"]["arguments"] = '{"x":1}'
    first, second = texts(
        KIMI, user("a"), assistant("", "t", tool_calls=[compact]), tool(0, "r"), assistant("d", "u")
    )
    assert '<|tool_call_argument_begin|>{"x":1}<|tool_call_end|>' in first
    assert '<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>' in second
    assert "[[u</think>d]]" in second
    # A template that writes any arguments as JSON would write text in quotes.
    template = KIMI.replace("arguments if arguments is string else ", "")
    (text,) = texts(template, user("a"), assistant("", "t", tool_calls=[call(0)]))
    assert '{"x": 1}<|tool_call_end|>' in text


def with_arguments(arguments: object) -> dict[str, Any]:
    calls = [{"id": "0", "function": {"name": "f", "arguments": arguments}}]
    return assistant("", tool_calls=calls)


@pytest.mark.parametrize("arguments", [None, "", {}])
def test_calls_without_arguments_have_empty_ones(arguments: object) -> None:
    (text,) = texts(KIMI, user("a"), with_arguments(arguments))
    assert "0<|tool_call_argument_begin|>{}<|tool_call_end|>" in text


def test_calls_that_vllm_would_refuse_are_refused() -> None:
    with pytest.raises(InputError, match="turn 2 has tool calls that vLLM would refuse"):
        texts(KIMI, user("a"), with_arguments("{"))


def test_thinking_inline_or_under_another_key_is_the_same_as_apart() -> None:
    apart = texts(KIMI, user("a"), assistant("b", "B"))
    assert texts(KIMI, user("a"), assistant("<think>B</think>b")) == apart
    assert texts(KIMI, user("a"), assistant("b", thinking="B")) == apart
    assert texts(KIMI, user("a"), assistant("b", reasoning="B")) == apart


def test_qwen3_keeps_thinking_behind_the_last_question() -> None:
    for turn in (assistant("b", "B"), assistant("<think>\nB\n</think>\n\nb")):
        first, second = texts(QWEN3, user("a"), turn, user("c"), assistant("d", "D"))
        asked = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        assert first == asked + "[[<think>\nB\n</think>\n\nb]]<|im_end|>\n"
        assert second == (
            asked + "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
            "[[<think>\nD\n</think>\n\nd]]<|im_end|>\n"
        )


def test_qwen3_without_thinking_is_asked_for_without() -> None:
    (text,) = texts(QWEN3, user("a"), assistant("b"))
    assert text.endswith("assistant\n<think>\n\n</think>\n\n[[b]]<|im_end|>\n")


def test_thinking_that_a_template_has_no_place_for_is_said_to_be_lost() -> None:
    (sample,) = render(CHATML, user("a"), assistant("b", "thought"))
    assert "thought" not in shown(sample)
    assert sample.notes == (THOUGHT_LOST,)
    assert texts(CHATML, user("a"), assistant("<think>t</think>b"))[0].endswith(
        "[[<think>t</think>b]]<|im_end|>\n"
    )


def test_a_turn_may_end_in_another_marker_than_an_answer_does() -> None:
    turns = (user("a"), assistant("b", tool_calls=[call(0)]), tool(0, "r"), assistant("c"))
    assert texts(TWO_ENDS, *turns) == [
        "<user>a<|eot|><assistant>[[bf]]<|eom|><tool>r<|eot|><assistant>[[c]]<|eot|>"
    ]


def test_a_template_whose_answers_do_not_follow_from_their_prompts_is_refused() -> None:
    with pytest.raises(InputError, match="turn 2: the chat template renders it differently"):
        texts(RAVING, user("a"), assistant("b"))


def test_a_token_across_a_border_is_refused_where_offsets_are_missing() -> None:
    renderer = Renderer(PairTokenizer(PLAIN))
    assert len(renderer.render([user("a"), assistant("b")])) == 1
    with pytest.raises(InputError, match="a token lies across the border"):
        renderer.render([user("a"), assistant("hello")])


def test_a_template_that_raises_is_refused_with_its_message() -> None:
    with pytest.raises(InputError, match="cannot render"):
        texts(PICKY, {"role": "system", "content": "S"}, assistant("b"))


@pytest.mark.parametrize("turns", [[user("hi")], [user("hi"), assistant("")]])
def test_a_conversation_without_answers_is_refused(turns: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="no assistant turn with content"):
        texts(PLAIN, *turns)


LETTERS = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=5)


@pytest.mark.parametrize("template", [PLAIN, CHATML, KIMI, QWEN3])
@settings(deadline=None)
@given(questions=st.lists(st.tuples(LETTERS, LETTERS, st.none() | LETTERS), min_size=1, max_size=4))
def test_every_answer_is_marked_once_in_a_prompt_that_the_engine_would_get(
    template: str, questions: list[tuple[str, str, str | None]]
) -> None:
    turns = normalize_turns(
        [
            turn
            for question, answer, thought in questions
            for turn in (user(question), assistant(answer, thought))
        ]
    )
    tokenizer = CharacterTokenizer(template)
    samples = Renderer(tokenizer).render(turns)
    assert [number for sample in samples for number in sample.turns] == list(
        range(2, len(turns) + 1, 2)
    )
    for sample in samples:
        text = "".join(map(chr, sample.input_ids))
        runs = sum(after > before for before, after in pairwise([0, *sample.loss_mask]))
        assert runs == len(sample.turns)
        for number in sample.turns:
            assert turns[number - 1]["content"] in text
            if template in (KIMI, QWEN3):
                assert turns[number - 1].get("reasoning_content", "") in text
        first = sample.loss_mask.index(1)
        prompts = [
            tokenizer.apply_chat_template(
                turns[: sample.turns[0] - 1], tokenize=False, add_generation_prompt=True, **mode
            )
            for mode in ({}, {"thinking": False, "enable_thinking": False})
        ]
        assert text[:first] in prompts


def test_sharegpt_turns_and_chat_messages_become_the_same() -> None:
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert normalize_turns(sharegpt) == normalize_turns([user("a"), assistant("b")])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalize_turns([{"role": "user", "content": parts}]) == [user("ab")]


def test_tool_calls_stay_with_their_turn() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert normalize_turns([turn]) == [{**turn, "content": ""}]


@pytest.mark.parametrize(
    ("turns", "fault"),
    [
        ([], "not an empty one"),
        ("text", "list of turns"),
        (["text"], "turn 1 is str"),
        ([user("a"), {"role": "robot", "content": "b"}], "turn 2 has role"),
        ([{"content": "a"}], "role None"),
        ([{"role": "user", "content": None}], "content of NoneType"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of list"),
        ([user("a"), assistant("b", thinking=["c"])], "turn 2 has thinking of list"),
    ],
)
def test_turns_that_are_not_text_of_a_known_role_are_refused(turns: object, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        normalize_turns(turns)
