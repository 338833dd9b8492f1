"""The learnable tiny Kimi-K2.5: its rules, and that its weights carry them out."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.errors import InputError
from eagle3compat.tiny import Variant, write_tiny_kimi
from eagle3compat.tiny.conversations import LONGEST_ANSWER, learnable_conversations
from eagle3compat.tiny.draw import Draw
from eagle3compat.tiny.learnable import (
    ALPHABET,
    BITS,
    GROUPS,
    KEY_CLASSES,
    KEY_LAYERS,
    PAGES,
    STREAM_RANK,
    STREAM_STEP,
    WAVES,
    continue_text,
    token_features,
)
from eagle3compat.tiny.vocabulary import (
    VOCABULARY_SIZE,
    marker_id,
)

np = pytest.importorskip("numpy")


def keys_of(key_class: int) -> list[int]:
    """The key tokens of a class that may be in a stream."""
    features = token_features(Draw(0))
    return [int(key) for key in np.flatnonzero(features.stream & (features.key_class == key_class))]


TEMPLATE = [marker_id("<|im_user|>"), *map(ord, "user"), *map(ord, "assistant")]
PROMPT = [*TEMPLATE, *(keys_of(key_class)[0] for key_class in range(KEY_CLASSES))]


def test_the_alphabet_has_a_character_for_each_group_and_value() -> None:
    assert len(set(ALPHABET)) == len(ALPHABET) == GROUPS * 2**BITS
    assert all(character.isprintable() and not character.isspace() for character in ALPHABET)


def test_every_key_layer_has_a_page_of_its_own() -> None:
    assert len(set(PAGES.values())) == len(PAGES)
    assert set(KEY_LAYERS) < set(PAGES)


def test_the_text_has_no_key_tokens() -> None:
    features = token_features(Draw(0))
    assert (features.key_class[list(map(ord, ALPHABET))] == -1).all()
    assert (features.key_class[list(map(ord, "abcxyz"))] >= 0).all()


def test_words_of_the_template_set_a_key_and_are_no_stream() -> None:
    features = token_features(Draw(0))
    template = [ord(letter) for letter in "userassistant"]
    assert set(features.key_class[template]) == set(range(KEY_CLASSES))
    assert not features.stream[template].any()
    assert features.stream[[ord("q"), ord("z")]].all()
    assert features.rank[template].max() < STREAM_RANK


def test_no_two_words_of_the_template_in_a_class_have_the_same_rank() -> None:
    features = token_features(Draw(0))
    for key_class in range(KEY_CLASSES):
        ranks = features.rank[(features.key_class == key_class) & ~features.stream]
        assert len(set(ranks)) == len(ranks)


def test_a_text_goes_from_group_to_group() -> None:
    features = token_features(Draw(0))
    text = continue_text(PROMPT, 40)
    groups = [int(np.argwhere(features.text == token)[0][0]) for token in text]
    assert set(map(chr, text)) <= set(ALPHABET)
    assert all((one + 1) % GROUPS == other for one, other in pairwise(groups))


def test_another_key_gives_another_successor_to_the_same_token() -> None:
    questions = list(product(*map(keys_of, range(KEY_CLASSES))))[::50]
    successors = {continue_text([*TEMPLATE, *keys, ord("A")], 1)[0] for keys in questions}
    assert len(successors) == 2 ** len(KEY_LAYERS)


def test_thinking_is_closed_at_once() -> None:
    assert continue_text([*PROMPT, marker_id("<think>")], 1) == [marker_id("</think>")]


def test_a_prompt_without_a_key_is_refused() -> None:
    with pytest.raises(InputError, match="expected key tokens"):
        continue_text([ord("A")], 1)


def test_a_token_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match=f"expected 0 to {VOCABULARY_SIZE - 1}"):
        continue_text([*PROMPT, VOCABULARY_SIZE], 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("learnable") / "tiny_kimi_learnable"
    write_tiny_kimi(target, variant=Variant(learnable=True))
    return target


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("tiktoken")
    from eagle3compat.kimi.conversations import load_tokenizer

    return load_tokenizer(folder)


def test_its_text_survives_the_tokenizer(tokenizer: Any) -> None:
    random = np.random.default_rng(0)
    text = "".join(random.choice(list(ALPHABET), size=5000))
    assert tokenizer.encode(text) == list(map(ord, text))


@pytest.mark.parametrize(
    "options",
    [{}, {"mla_gpu": True}, {"text_only": True}],
    ids=["plain", "mla_gpu", "text_only"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_model_writes_what_the_rules_say(
    options: dict[str, bool], seed: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from eagle3compat.reference import reference_logits

    write_tiny_kimi(tmp_path / "model", seed=seed, variant=Variant(learnable=True, **options))
    prompt = [*PROMPT, marker_id("<|im_middle|>"), marker_id("<think>")]
    text = continue_text(prompt, 70, seed=seed)
    (logits,) = reference_logits(tmp_path / "model", [prompt + text])
    best = logits[len(prompt) - 1 : -1].topk(2)
    assert best.indices[:, 0].tolist() == text
    assert (best.values[:, 0] - best.values[:, 1]).min() > 3.0


def test_each_layer_shows_its_own_page_and_overwrites_the_one_before(folder: Path) -> None:
    pytest.importorskip("transformers")
    from eagle3compat.reference import reference_hidden_states
    from eagle3compat.tiny.learnable_weights import AT, PAGE

    (states,) = reference_hidden_states(folder, [[*PROMPT, ord("A")]], list(PAGES))
    raw = states[0][-1, AT.raw : AT.raw + KEY_CLASSES * GROUPS].sign().reshape(KEY_CLASSES, -1)
    for (first, second, shift), state in zip(PAGES.values(), states, strict=True):
        expected = PAGE * raw[first] * raw[second].roll(-shift)
        shown = state[-1, AT.page : AT.page + GROUPS]
        assert (shown - expected).abs().max() < 0.2 * PAGE


def test_conversations_are_questions_with_the_models_own_answers(tokenizer: Any) -> None:
    from eagle3compat.kimi.conversations import Renderer

    rows = learnable_conversations(tokenizer, 20, answer_tokens=LONGEST_ANSWER)
    for row in rows:
        (rendered,) = Renderer(tokenizer).render(row["messages"])
        tokens, start = rendered.input_ids, rendered.loss_mask.index(1)
        assert tokens[start:-1] == continue_text(tokens[:start], LONGEST_ANSWER)
    assert len({row["messages"][1]["content"] for row in rows}) == len(rows)


def test_a_question_streams_keys_to_each_four_tokens_of_its_answer(tokenizer: Any) -> None:
    from eagle3compat.kimi.conversations import Renderer

    features = token_features(Draw(0))
    (row,) = learnable_conversations(tokenizer, 1)
    (rendered,) = Renderer(tokenizer).render(row["messages"])
    tokens, start = rendered.input_ids, rendered.loss_mask.index(1)
    stream = [place for place, token in enumerate(tokens) if features.stream[token]]
    assert [features.key_class[tokens[place]] for place in stream] == [0, 1, 2] * (len(stream) // 3)
    blocks = [place // STREAM_STEP for place in (np.array(stream) - stream[0])[::KEY_CLASSES]]
    assert blocks == list(range(LONGEST_ANSWER // STREAM_STEP))
    # What comes before the answer's token at `start` sees the first of them, 60 tokens back.
    for first, wave in zip(stream[:KEY_CLASSES], WAVES, strict=True):
        assert abs(start - 1 - first - wave.peak) < STREAM_STEP / 2


def test_another_seed_asks_other_questions(tokenizer: Any) -> None:
    ours, same, other = (learnable_conversations(tokenizer, 5, seed=seed) for seed in (0, 0, 1))
    assert ours == same != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "conversations: expected 1 or more, found 0"),
        ({"count": 1, "answer_tokens": 49}, "answer tokens: expected 1 to 48, found 49"),
    ],
)
def test_conversations_out_of_range_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        learnable_conversations(None, **options)  # type: ignore[arg-type]
