"""The tiny Kimi-K2.5's tokenizer, chat template and image processor, loaded by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eagle3compat.tiny import Variant, write_tiny_kimi
from eagle3compat.tiny.vocabulary import FIRST_SPECIAL_TOKEN, MARKERS, VOCABULARY_SIZE, marker_id

transformers = pytest.importorskip("transformers")
pytest.importorskip("tiktoken")
pytest.importorskip("jinja2")

USER = {"role": "user", "content": "Hi"}
WEATHER = {
    "id": "functions.weather:0",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Oslo"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tiny") / "tiny_kimi_for_tokenizer"
    write_tiny_kimi(target)
    return target


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def chat(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def test_its_code_runs_only_when_trusted(folder: Path, tokenizer: Any) -> None:
    assert type(tokenizer).__module__.startswith("transformers_modules.")
    try:
        other = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:  # transformers 4
        assert "trust_remote_code" in str(error)
    else:  # transformers 5 makes a tokenizer of its own from tiktoken.model
        assert type(other).__module__.startswith("transformers.")


def test_the_text_only_checkpoint_has_the_same_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    write_tiny_kimi(tmp_path / "text", variant=Variant(text_only=True))
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "text", trust_remote_code=True)
    assert other.get_vocab() == tokenizer.get_vocab()
    assert other.chat_template == tokenizer.chat_template


def test_it_is_a_python_tokenizer_without_offsets(tokenizer: Any) -> None:
    assert not tokenizer.is_fast
    try:
        encoded = tokenizer("Hi", return_offsets_mapping=True)
    except NotImplementedError:  # transformers 4
        return
    assert "offset_mapping" not in encoded  # transformers 5 leaves it out


def test_the_vocabulary_is_that_of_the_model(tokenizer: Any) -> None:
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCABULARY_SIZE))
    assert len(tokenizer) == tokenizer.vocab_size == VOCABULARY_SIZE


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_is_one_token_in_running_text(tokenizer: Any, marker: str) -> None:
    assert tokenizer.convert_tokens_to_ids(marker) == marker_id(marker)
    ids = tokenizer.encode(f"a{marker} b")
    assert ids.count(marker_id(marker)) == 1
    assert tokenizer.decode(ids) == f"a{marker} b"


def test_no_tokens_are_added_around_a_text(tokenizer: Any) -> None:
    assert tokenizer("kimi")["input_ids"] == tokenizer.encode("kimi", add_special_tokens=False)
    assert len(tokenizer("kimi")["input_ids"]) == 1


def test_decoding_skips_chat_markers_and_keeps_thinking_and_tool_calls(tokenizer: Any) -> None:
    text = "<|im_user|>user<|im_middle|><think>hm</think><|tool_call_begin|>x<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == (
        "user<think>hm</think><|tool_call_begin|>x"
    )


def test_text_outside_the_merges_falls_apart_into_bytes(tokenizer: Any) -> None:
    ids = tokenizer.encode("月")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "月"
    assert tokenizer.decode(ids[:1]) == "�"


@given(st.text())
@example(" leading and  double spaces \n\n")
@example("Kimi 月之暗面 🌙 1234567 don't")
def test_any_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= token_id < VOCABULARY_SIZE for token_id in ids)
    assert tokenizer.decode(ids) == text


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",)), min_size=1))
def test_plain_text_never_yields_a_special_token(tokenizer: Any, text: str) -> None:
    if not any(marker in text for marker in MARKERS):
        assert max(tokenizer.encode(text)) < FIRST_SPECIAL_TOKEN


def test_user_and_system_turns(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert chat(tokenizer, messages, add_generation_prompt=True) == (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        "<|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )


def test_without_thinking_the_prompt_closes_the_thinking(tokenizer: Any) -> None:
    text = chat(tokenizer, [USER], add_generation_prompt=True, thinking=False)
    assert text.endswith("<|im_assistant|>assistant<|im_middle|><think></think>")


def test_a_finished_answer_drops_what_was_thought(tokenizer: Any) -> None:
    answer = {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."}
    assert chat(tokenizer, [USER, answer]) == (
        "<|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>Hello<|im_end|>"
    )


def test_a_running_tool_loop_keeps_its_thinking_calls_and_results(tokenizer: Any) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Look it up.",
        "tool_calls": [WEATHER],
    }
    result = {"role": "tool", "tool_call_id": "functions.weather:0", "content": "rain"}
    assert chat(tokenizer, [USER, call, result]) == (
        "<|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>Look it up.</think>"
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.weather:0\nrain<|im_end|>"
    )


def test_tools_are_declared_first(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    text = chat(tokenizer, [USER], tools=[tool])
    assert text.startswith('<|im_system|>tool_declare<|im_middle|>[{"type": "function"')


def test_parts_of_a_message_are_joined_and_media_have_one_placeholder(tokenizer: Any) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    text = chat(tokenizer, [{"role": "user", "content": parts}])
    assert text == (
        "<|im_user|>user<|im_middle|><|media_begin|>image<|media_content|><|media_pad|>"
        "<|media_end|>What is this?<|im_end|>"
    )
    assert tokenizer.encode(text).count(marker_id("<|media_pad|>")) == 1


def test_the_vocabulary_is_saved_with_the_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "tiktoken.model").exists()


def test_the_configuration_class_nests_a_deepseek_configuration(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert isinstance(config.text_config, transformers.DeepseekV3Config)
    assert config.get_text_config().num_hidden_layers == 8
    assert config.vision_config.hidden_size == 32


def test_an_image_becomes_as_many_patches_as_its_tokens_need(folder: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
    image = {"type": "image", "image": image_module.new("RGB", (90, 60), "red")}
    batch = processor.preprocess([image])
    frames, rows, columns = batch["grid_thws"][0].tolist()
    assert (frames, rows, columns) == (1, 6, 8)
    assert tuple(batch["pixel_values"].shape) == (rows * columns, 3, 14, 14)
    assert processor.media_tokens_calculator(image) == rows * columns // 4
    assert batch["pixel_values"][:, 0].min().item() == 1.0
    assert batch["pixel_values"][:, 1].max().item() == -1.0


def test_a_video_is_split_into_chunks_that_share_their_tokens(folder: Path) -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("PIL.Image")
    processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
    chunks = processor.split_video_chunks(np.zeros((6, 56, 28, 3), dtype=np.uint8))
    assert [len(chunk["video_chunk"]) for chunk in chunks] == [4, 2]
    assert [chunk["prompt"][:12] for chunk in chunks] == ["00:00:00.000", "00:00:02.000"]
    batch = processor.preprocess(chunks)
    assert batch["grid_thws"].tolist() == [[4, 4, 2], [2, 4, 2]]
    assert len(batch["pixel_values"]) == (4 + 2) * 4 * 2
    assert processor.media_tokens_calculator(chunks[0]) == 2
