"""What `audit` tells of sample files alone, as speculators writes them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import extraction_folders as folders
import pytest
from extraction_folders import TEXTS, listed, load, save

from eagle3compat.errors import InputError
from eagle3compat.kimi.audit import AuditSettings, audit
from eagle3compat.kimi.storage import sample_path
from eagle3compat.tiny import write_tiny_kimi

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_kimi(folder)
    return folder


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def made(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    return folders.write_samples(model, tmp_path_factory.mktemp("made") / "out", request.param)


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "out"))


def change(out: Path, index: int, edit: Any) -> None:
    content = load(sample_path(out, index))
    edit(content)
    save(sample_path(out, index), content)


def test_right_files_are_right_with_and_without_a_checkpoint(out: Path, model: Path) -> None:
    report = audit(AuditSettings(out, model=model))
    assert listed(report) == []
    assert not report.recorded
    assert (report.samples, report.tokens) == (len(TEXTS), sum(map(len, TEXTS)))
    assert "equal beginnings have equal rows: 5 samples share one with another" in report.checked
    assert "last states and next tokens of the text belong together" in report.checked
    report = audit(AuditSettings(out))
    assert listed(report) == []
    assert "text and vocabulary: name the verifier with --model" in report.not_checked
    assert not any("text" in line for line in report.checked)


def cut(content: dict[str, Any]) -> None:
    content["hidden_states"] = [layer[:9].clone() for layer in content["hidden_states"]]


def zero(content: dict[str, Any]) -> None:
    content["hidden_states"][1].zero_()


def infinite(content: dict[str, Any]) -> None:
    content["hidden_states"][1][4, 4] = float("inf")


def repeat(content: dict[str, Any]) -> None:
    content["hidden_states"][2] = content["hidden_states"][0].clone()


def shorten_the_mask(content: dict[str, Any]) -> None:
    content["loss_mask"] = content["loss_mask"][:-1].clone()


def leave_no_mask(content: dict[str, Any]) -> None:
    content["loss_mask"] = None


def number_the_mask(content: dict[str, Any]) -> None:
    content["loss_mask"][3] = 2


def use_another_vocabulary(content: dict[str, Any]) -> None:
    content["input_ids"][-1] = 384


def lose_a_layer(content: dict[str, Any]) -> None:
    content["hidden_states"].pop()


@pytest.mark.parametrize(
    ("edit", "kind", "what"),
    [
        (cut, "cut", "every layer: cut: 9 of 40 rows"),
        (zero, "zeroed", "layer at place 1: zeros alone"),
        (infinite, "not finite", "layer at place 1: NaN or infinity in row 4"),
        (repeat, "layers", "layers at places 0, 2 are the same"),
        (shorten_the_mask, "input", "39 entries of the loss mask for 40 tokens"),
        (leave_no_mask, "input", "holds no loss mask, which the trainer needs"),
        (number_the_mask, "input", "its loss mask holds other numbers than 0 and 1"),
        (use_another_vocabulary, "input", "token id 384 is outside the verifier's vocabulary"),
        (lose_a_layer, "shape", "3 layers of 128 in "),
    ],
)
def test_a_fault_within_a_file_is_named(
    out: Path, model: Path, edit: Any, kind: str, what: str
) -> None:
    change(out, 4, edit)
    found = listed(audit(AuditSettings(out, model=model)))
    assert all(sample == 4 for sample, _, _ in found)
    assert found[0][1] == kind
    assert what in found[0][2]


def exchange_states(out: Path, one: int, other: int) -> None:
    contents = [load(sample_path(out, index)) for index in (one, other)]
    for index, content, states in zip(
        (one, other), contents, [each["hidden_states"] for each in reversed(contents)], strict=True
    ):
        save(sample_path(out, index), {**content, "hidden_states": states})


def test_states_of_two_samples_that_were_mixed_up_are_named(out: Path, model: Path) -> None:
    # As many rows each, and the same first token, so that neither their shapes nor it tells.
    assert (len(TEXTS[0]), TEXTS[0][0]) == (len(TEXTS[2]), TEXTS[2][0])
    exchange_states(out, 0, 2)
    found = listed(audit(AuditSettings(out, model=model)))
    assert [(sample, kind) for sample, kind, _ in found] == [(0, "text"), (2, "text")]
    assert "they fit those of sample 2" in found[0][2]
    assert "they fit those of sample 0" in found[1][2]


def test_rows_that_are_one_place_off_are_named(out: Path, model: Path) -> None:
    def shift(content: dict[str, Any]) -> None:
        content["hidden_states"] = [layer.roll(1, 0) for layer in content["hidden_states"]]

    change(out, 7, shift)
    found = listed(audit(AuditSettings(out, model=model)))
    assert {sample for sample, _, _ in found} == {7}
    assert any(
        "they fit those 1 place before them" in what for _, kind, what in found if kind == "text"
    )


def test_a_folder_that_is_mostly_wrong_is_judged_by_its_right_samples(
    out: Path, model: Path
) -> None:
    """As speculators 0.3.0 leaves it when a batch exceeds the token budget: from one sample on,
    each has rows that belong further on in the batch."""
    contents = [load(sample_path(out, index)) for index in range(len(TEXTS))]
    states = [each["hidden_states"] for each in contents]
    rows = [torch.cat(layers) for layers in zip(*states, strict=True)]
    start = sum(map(len, TEXTS[:3])) + 5
    for index, content in enumerate(contents[3:-1], start=3):
        end = start + len(TEXTS[index])
        content["hidden_states"] = [layer[start:end].clone() for layer in rows]
        save(sample_path(out, index), content)
        start = end
    found = listed(audit(AuditSettings(out, model=model)))
    assert {sample for sample, _, _ in found} == {3, 4, 5, 6}
    assert any("they fit those 5 places after them" in what for _, _, what in found)


def test_a_text_that_the_verifier_does_not_model_is_not_judged(model: Path, tmp_path: Path) -> None:
    import random

    out = tmp_path / "out"
    out.mkdir()
    draw = random.Random(0)
    texts = [[draw.randrange(384) for _ in range(20)] for _ in range(6)]
    states = folders.reference(model).hidden_states(texts, folders.LAYERS)
    for index, (text, layers) in enumerate(zip(texts, states, strict=True)):
        mask = torch.ones(len(text), dtype=torch.long)
        content = {"input_ids": torch.tensor(text), "loss_mask": mask, "hidden_states": layers}
        save(sample_path(out, index), content)
    report = audit(AuditSettings(out, model=model))
    assert report.right
    assert any("the verifier does not model it" in line for line in report.not_checked)
    assert not any("text" in line for line in report.checked)


def test_the_odd_one_among_equal_beginnings_is_named(out: Path) -> None:
    """Samples 0, 2, 4 and 6 begin with one token; the states of one of them are another's."""

    def replace_the_first_row(content: dict[str, Any]) -> None:
        for layer in content["hidden_states"]:
            layer[0] = layer[5]

    change(out, 0, replace_the_first_row)  # the one that all others are compared with
    found = listed(audit(AuditSettings(out)))
    assert [(sample, kind) for sample, kind, _ in found] == [(0, "rows")]
    assert "row 0 of the layer at place 0 differs, though the first 1 tokens" in found[0][2]
    assert "is wrong" not in found[0][2]


def test_of_two_alone_neither_is_accused(out: Path) -> None:
    for index in range(len(TEXTS)):
        if index not in (3, 7):
            sample_path(out, index).unlink()

    def replace_the_first_row(content: dict[str, Any]) -> None:
        content["hidden_states"][3][0] = content["hidden_states"][3][5]

    change(out, 7, replace_the_first_row)
    found = [each for each in listed(audit(AuditSettings(out))) if each[1] == "rows"]
    (finding,) = found
    assert "it or sample" in finding[2]


def test_the_same_states_under_other_tokens_are_named(out: Path) -> None:
    states = load(sample_path(out, 0))["hidden_states"]
    change(out, 2, lambda content: content.update(hidden_states=states))
    found = listed(audit(AuditSettings(out)))
    assert (2, "another sample", "has the states of sample 0, of other tokens") in found


def test_the_same_sample_twice_is_no_fault(out: Path) -> None:
    shutil.copy(sample_path(out, 3), sample_path(out, len(TEXTS)))
    assert audit(AuditSettings(out)).right


def test_exchanged_layers_are_told_by_their_norms_where_these_differ(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    generator = torch.Generator().manual_seed(0)
    for index in range(8):
        states = [
            size * torch.randn(20, 64, generator=generator) for size in (1.0, 4.0, 30.0, 31.0)
        ]
        if index == 5:
            states[0], states[2] = states[2], states[0]
        tokens = torch.arange(20) + 100 * index
        content = {"input_ids": tokens, "loss_mask": tokens * 0 + 1, "hidden_states": states}
        save(sample_path(out, index), content)
    report = audit(AuditSettings(out))
    what = "layers at places 0 and 2 are exchanged, by their norms"
    assert listed(report) == [(5, "layers", what)]
    assert "exchanged layers, by norms, at places 2 and 3: norms too alike" in report.not_checked


def test_a_bit_that_changed_on_the_disk_is_named(out: Path) -> None:
    path = sample_path(out, 1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found = listed(audit(AuditSettings(out)))
    assert any(sample == 1 and "CRC-32" in what for sample, _, what in found)


def test_archives_without_checksums_are_not_accused(out: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        change(out, 1, lambda content: None)
    finally:
        torch.serialization.set_crc32_options(True)
    assert audit(AuditSettings(out)).right


def test_files_that_are_missing_or_too_many_are_named(out: Path) -> None:
    sample_path(out, 2).unlink()
    sample_path(out, 3).unlink()
    (out / "token_freq.pt").touch()
    (out / "data_config.json").touch()
    assert listed(audit(AuditSettings(out))) == [
        (None, "stray file", "is no data_{index}.pt, and the trainer reads it"),
        (None, "missing", "2 samples are missing: 2-3"),
    ]


def test_a_truncated_file_is_named(out: Path) -> None:
    content = sample_path(out, 6).read_bytes()
    sample_path(out, 6).write_bytes(content[:-10])
    ((sample, kind, what),) = listed(audit(AuditSettings(out)))
    assert (sample, kind) == (6, "unreadable")
    assert "its end is missing" in what


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"again_count": 1}, "--again: name the verifier"),
        ({"layers": (1, 2)}, "--layers: names 2 layers, the samples have 4"),
        ({"model": Path("nowhere")}, "no such folder"),
    ],
)
def test_bad_input_is_named(out: Path, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        audit(AuditSettings(out, **options))
