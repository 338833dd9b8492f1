"""Conversations through real tokenizers, and beside speculators' own preprocessing."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from chat_templates import CHATML, KIMI, QWEN3
from fast_tokenizer import fast_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3compat.kimi.conversations import Renderer, load_tokenizer, normalize_turns
from eagle3compat.kimi.dataset import SampleFile
from eagle3compat.kimi.preparation import Request, prepare_data
from eagle3compat.kimi.row_preparer import OURS, SPECULATORS, TOO_LONG, RowSettings
from eagle3compat.kimi.speculators_masks import SpeculatorsMasks, find_speculators_masks
from eagle3compat.kimi.verifier import read_verifier
from eagle3compat.tiny import write_tiny_kimi

pytest.importorskip("transformers")
pytest.importorskip("tiktoken")
pytest.importorskip("jinja2")

CONVERSATION = [
    {"role": "user", "content": "What is 2 and 2?"},
    {
        "role": "assistant",
        "reasoning_content": "I add.",
        "content": "",
        "tool_calls": [{"id": "functions.add:0", "function": {"name": "add", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "functions.add:0", "content": "4"},
    {"role": "assistant", "reasoning_content": "Done 🍎", "content": "4 你好"},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "reasoning_content": "More.", "content": "7"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kimi") / "tiny_kimi_for_conversations"
    write_tiny_kimi(target)
    return target


@pytest.fixture(scope="module")
def kimi_renderer(kimi: Path) -> Renderer:
    return Renderer(load_tokenizer(kimi))


@pytest.fixture(scope="module")
def preprocessing() -> ModuleType:
    pytest.importorskip("speculators")
    pytest.importorskip("vllm")
    from speculators.data_generation import preprocessing

    return preprocessing


def marked(renderer: Renderer, input_ids: list[int], loss_mask: list[int]) -> str:
    tokens = [token for token, each in zip(input_ids, loss_mask, strict=True) if each]
    return str(renderer.tokenizer.decode(tokens))


def test_kimi_thinking_and_tool_calls_are_marked_as_the_engine_adds_them(
    kimi_renderer: Renderer,
) -> None:
    loop, last = kimi_renderer.render(normalize_turns(CONVERSATION), TOOLS)
    assert marked(kimi_renderer, loop.input_ids, loop.loss_mask) == (
        "I add.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
        "Done 🍎</think>4 你好"
    )
    assert marked(kimi_renderer, last.input_ids, last.loss_mask) == "More.</think>7"
    whole = kimi_renderer.tokenizer.decode(last.input_ids)
    assert whole.startswith("<|im_system|>tool_declare<|im_middle|>")
    assert "I add." not in whole and "Done" not in whole


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12)), min_size=1, max_size=3))
def test_kimi_tokens_are_those_of_the_template(
    kimi_renderer: Renderer, turns: list[tuple[str, str]]
) -> None:
    messages = [
        message
        for question, answer in turns
        for message in (
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer + "."},
        )
    ]
    (sample,) = kimi_renderer.render(messages)
    tokens = kimi_renderer.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, thinking=False
    )
    assert sample.input_ids == tokens
    added = marked(kimi_renderer, sample.input_ids, sample.loss_mask)
    assert added == "".join(answer + "." for _, answer in turns)


def test_kimi_conversations_become_samples_that_extract_reads(kimi: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [
        {"messages": CONVERSATION, "tools": TOOLS},
        {"messages": [{"role": "user", "content": "x" * 3000}, CONVERSATION[-1]]},
    ]
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    account = prepare_data(Request(str(data), tmp_path / "out", RowSettings(kimi)), lambda _: None)
    assert account.tally.dropped == {TOO_LONG: 1}
    assert account.tally.through == {OURS: 2}
    assert "without the offsets" in account.route
    verifier = read_verifier(kimi)
    prepared = SampleFile(tmp_path / "out", verifier, 2048)
    data.write_text(json.dumps(rows[0]) + "\n")
    rendered = SampleFile(data, verifier, 2048)
    assert [each.input_ids for each in prepared] == [each.input_ids for each in rendered]
    assert [each.loss_mask for each in prepared] == [each.loss_mask for each in rendered]
    assert prepared.digest == rendered.digest == account.tally.digest
    assert rendered[1].line == 1


def test_a_table_of_conversations_is_the_same_as_its_lines(kimi: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": CONVERSATION}, {"messages": plain(["hi", "hello"])}]
    # A table gives every turn every key of any turn.
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "table"))
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(each) + "\n" for each in rows))

    def samples(data: Path) -> list[list[int]]:
        out = tmp_path / f"prepared-{data.name}"
        prepare_data(Request(str(data), out, RowSettings(kimi)), lambda _: None)
        return [each.input_ids for each in SampleFile(out, read_verifier(kimi), 2048)]

    assert samples(tmp_path / "table") == samples(lines)


def plain(texts: list[str]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


# What speculators reads as a marker, or as thinking, is not plain text to it.
TEXT = st.text(st.characters(exclude_characters="<", exclude_categories=("Cs",)), min_size=1)


@pytest.mark.parametrize("template", [CHATML, KIMI], ids=["chatml", "kimi"])
def test_our_masks_are_those_of_speculators_on_a_tokenizer_with_offsets(
    preprocessing: ModuleType, template: str
) -> None:
    renderer = Renderer(fast_tokenizer(template))
    masks = SpeculatorsMasks(preprocessing, renderer.tokenizer)

    @settings(deadline=None, max_examples=60)
    @given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
    def compare(pairs: list[tuple[str, str]]) -> None:
        turns = plain([text for pair in pairs for text in pair])
        theirs = masks.render(turns)
        assert theirs is None or [theirs] == renderer.render(turns)
        assert theirs is not None or any(not turn["content"].strip() for turn in turns)

    compare()


def test_speculators_is_asked_only_where_it_is_right(
    preprocessing: ModuleType, kimi_renderer: Renderer
) -> None:
    masks, reason = find_speculators_masks(Renderer(fast_tokenizer(CHATML)))
    assert masks is not None
    assert "agree" in reason
    # With Qwen3's template 0.3.0 marks the last answer alone.
    masks, reason = find_speculators_masks(Renderer(fast_tokenizer(QWEN3)))
    assert masks is None
    assert "unlike what the engine would see" in reason
    masks, reason = find_speculators_masks(kimi_renderer)
    assert masks is None
    assert "without the offsets" in reason


def test_conversations_go_through_speculators_unless_it_would_leave_something_out(
    preprocessing: ModuleType, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = fast_tokenizer(CHATML)
    tokenizer.save_pretrained(model)
    config = {"num_hidden_layers": 8, "hidden_size": 16, "vocab_size": len(tokenizer)}
    (model / "config.json").write_text(json.dumps(config))
    rows = [
        plain(["hello", "world", "what is 10?", " 100"]),
        [{"role": "tool", "content": "4"}, *plain(["hello", "world"])],
        plain(["hello", "world", "more"]),
        plain(["x" * 100, "y"]),
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"conversations": each}) + "\n" for each in rows))

    def prepare(name: str, **options: Any) -> tuple[Any, bytes]:
        settings = RowSettings(model, max_model_len=80, **options)
        account = prepare_data(Request(str(data), tmp_path / name, settings), lambda _: None)
        return account.tally, (tmp_path / name / "part-00000.jsonl").read_bytes()

    tally, samples = prepare("asked")
    assert tally.through == {SPECULATORS: 1, OURS: 2}
    assert tally.dropped == {TOO_LONG: 1}
    own, ours = prepare("own", ask_speculators=False)
    assert own.through == {OURS: 3}
    assert ours == samples
