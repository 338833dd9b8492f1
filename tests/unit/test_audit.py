"""`audit` names what is wrong with a folder of samples, and nothing where all is right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import extraction_folders as folders
import pytest
from extraction_folders import TEXTS, listed, load, save

from eagle3compat.errors import InputError
from eagle3compat.kimi.audit import AuditSettings, audit
from eagle3compat.kimi.manifest import read_manifests
from eagle3compat.kimi.storage import sample_path
from eagle3compat.tiny import write_tiny_kimi

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_kimi(folder)
    return folder


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def made(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    return folders.write_extraction(model, tmp_path_factory.mktemp("made") / "out", request.param)


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A whole extraction to spoil."""
    return Path(shutil.copytree(made, tmp_path / "out"))


def sample(out: Path, index: int) -> Path:
    return sample_path(out / "hidden_states", index)


def the_finding(out: Path) -> tuple[int | None, str, str]:
    """The only one."""
    (finding,) = listed(audit(AuditSettings(out)))
    return finding


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = load(path)
    edit(content)
    save(path, content)


def test_a_whole_extraction_is_right(out: Path, model: Path) -> None:
    report = audit(AuditSettings(out))
    assert listed(report) == []
    assert report.right
    assert (report.samples, report.tokens) == (len(TEXTS), sum(map(len, TEXTS)))
    assert not report.not_checked
    assert any(f"lm_head.weight of {model}" in line for line in report.checked)


def test_shards_are_audited_together(model: Path, tmp_path: Path) -> None:
    out = folders.write_extraction(model, tmp_path / "out", shards=3)
    assert audit(AuditSettings(out)).right
    (out / "manifest-1-of-3.jsonl").unlink()
    findings = listed(audit(AuditSettings(out)))
    assert (None, "shard", "is missing: shard 1 of 3, counted from 0") in findings
    assert [sample for sample, kind, _ in findings if kind == "stray file"] == [None] * 3


# One file


def test_two_files_that_are_swapped_are_named(out: Path) -> None:
    one, other = sample(out, 2), sample(out, 5)
    kept = one.rename(out / "kept")
    other.rename(one)
    kept.rename(other)
    assert listed(audit(AuditSettings(out))) == [
        (2, "another sample", "is sample 5's file"),
        (5, "another sample", "is sample 2's file"),
    ]


def test_states_of_another_sample_beside_the_right_tokens_are_named(out: Path) -> None:
    # Samples 0 and 2 have as many tokens.
    states = load(sample(out, 2))["hidden_states"]
    change(sample(out, 0), lambda content: content.update(hidden_states=states))
    assert the_finding(out) == (0, "another sample", "holds the states of sample 2")


def test_one_layer_of_another_sample_is_named(out: Path) -> None:
    layer = load(sample(out, 2))["hidden_states"][1]
    change(sample(out, 0), lambda content: content["hidden_states"].__setitem__(1, layer))
    what = "layer 4: holds the states of layer 4 of sample 2"
    assert the_finding(out) == (0, "another sample", what)


def exchange_layers(content: dict[str, Any]) -> None:
    states = content["hidden_states"]
    states[1], states[3] = states[3], states[1]


def turn_layers(content: dict[str, Any]) -> None:
    content["hidden_states"] = [*content["hidden_states"][1:], content["hidden_states"][0]]


def repeat_a_layer(content: dict[str, Any]) -> None:
    content["hidden_states"][2] = content["hidden_states"][0].clone()


def lose_a_layer(content: dict[str, Any]) -> None:
    content["hidden_states"].pop()


def cut_all(content: dict[str, Any]) -> None:
    content["hidden_states"] = [layer[:17].clone() for layer in content["hidden_states"]]


def cut_one(content: dict[str, Any]) -> None:
    content["hidden_states"][3] = content["hidden_states"][3][:17].clone()


def cut_everything(content: dict[str, Any]) -> None:
    cut_all(content)
    for key in ("input_ids", "loss_mask"):
        content[key] = content[key][:17].clone()


def add_a_row(content: dict[str, Any]) -> None:
    layer = content["hidden_states"][0]
    content["hidden_states"][0] = torch.cat([layer, layer[-1:]])


def zero_all(content: dict[str, Any]) -> None:
    for layer in content["hidden_states"]:
        layer.zero_()


def zero_one(content: dict[str, Any]) -> None:
    content["hidden_states"][2].zero_()


def zero_rows(content: dict[str, Any]) -> None:
    content["hidden_states"][0][20:] = 0


def make_nan(content: dict[str, Any]) -> None:
    content["hidden_states"][3][5, 7] = float("nan")


def flip_a_bit(content: dict[str, Any]) -> None:
    layer = content["hidden_states"][1]
    bits = layer.view(torch.int16 if layer.element_size() == 2 else torch.int32)
    bits[9, 33] ^= 1


def exchange_rows(content: dict[str, Any]) -> None:
    for layer in content["hidden_states"]:
        layer[[3, 11]] = layer[[11, 3]]


def move_a_row(content: dict[str, Any]) -> None:
    order = [0, 1, *range(3, 21), 2, *range(21, 40)]
    content["hidden_states"][2] = content["hidden_states"][2][order].clone()


def move_all_rows(content: dict[str, Any]) -> None:
    content["hidden_states"] = [layer.roll(1, 0) for layer in content["hidden_states"]]


def draw_anew(content: dict[str, Any]) -> None:
    layer = content["hidden_states"][0]
    layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(0)))


def widen(content: dict[str, Any]) -> None:
    content["hidden_states"] = [layer.double() for layer in content["hidden_states"]]


def narrow(content: dict[str, Any]) -> None:
    content["hidden_states"][0] = content["hidden_states"][0][:, :64].clone()


def change_a_token(content: dict[str, Any]) -> None:
    content["input_ids"][3] += 1


def change_the_mask(content: dict[str, Any]) -> None:
    content["loss_mask"][0] = 1


def lose_the_mask(content: dict[str, Any]) -> None:
    content["loss_mask"] = None


def add_a_key(content: dict[str, Any]) -> None:
    content["comment"] = torch.zeros(100)


@pytest.mark.parametrize(
    ("spoil", "kind", "what"),
    [
        (exchange_layers, "layers", "layers 4 and 7 are exchanged"),
        (turn_layers, "layers", "layers are in the order 4, 5, 7, 2, expected 2, 4, 5, 7"),
        (repeat_a_layer, "layers", "layer 5: holds the states of layer 2"),
        (lose_a_layer, "layers", "3 layers, expected 4"),
        (cut_all, "cut", "every layer: cut: 17 of 40 rows"),
        (cut_one, "cut", "layer 7: cut: 17 of 40 rows"),
        (cut_everything, "cut", "cut: 17 of 40 tokens"),
        (add_a_row, "rows", "layer 2: 41 rows, expected 40"),
        (zero_all, "zeroed", "every layer: zeros alone"),
        (zero_one, "zeroed", "layer 5: zeros alone"),
        (zero_rows, "zeroed", "layer 2: rows 20-39 of 40: zeros alone"),
        (make_nan, "not finite", "layer 7: NaN or infinity in row 5"),
        (flip_a_bit, "bits", "layer 4: one bit of row 9 is flipped"),
        (exchange_rows, "rows", "every layer: rows 3 and 11 are exchanged"),
        (move_a_row, "rows", "layer 5: row 2 is moved to 20"),
        (move_all_rows, "rows", "every layer: rows are moved on by 1"),
        (draw_anew, "bits", "layer 2: not the states that were extracted (mean norm of a row 11."),
        (widen, "shape", "every layer: dtype float64, expected "),
        (narrow, "shape", "layer 2: shape [40, 64], expected [40, 128]"),
        (change_a_token, "input", "its token ids or its loss mask are not those"),
        (change_the_mask, "input", "its token ids or its loss mask are not those"),
        (lose_the_mask, "input", "holds no loss mask"),
        (add_a_key, "size", "what it holds is as it was"),
    ],
)
def test_what_became_of_a_file_is_named(out: Path, spoil: Any, kind: str, what: str) -> None:
    assert len(TEXTS[4]) == 40
    change(sample(out, 4), spoil)
    index, found_kind, found_what = the_finding(out)
    assert (index, found_kind) == (4, kind)
    assert what in found_what


def test_a_missing_file_is_named(out: Path) -> None:
    sample(out, 3).unlink()
    assert the_finding(out) == (3, "missing", "is missing")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(out: Path, share: float) -> None:
    content = sample(out, 3).read_bytes()
    sample(out, 3).write_bytes(content[: int(share * len(content))])
    index, kind, what = the_finding(out)
    assert (index, kind) == (3, "cut")
    assert what.startswith(f"cut: {int(share * len(content)):,} of {len(content):,} bytes")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([1, 2], "holds list, expected a dictionary"),
        ({"input_ids": 1}, "holds no loss_mask and no hidden_states"),
    ],
)
def test_another_file_in_a_samples_place_is_named(out: Path, content: Any, what: str) -> None:
    record = read_manifests(out)[0].samples[0]
    save(sample(out, 0), content)
    folders.rewrite_record(out, record, bytes=1)
    assert the_finding(out) == (0, "unreadable", what)


def test_code_in_a_file_is_not_run(out: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"input_ids": Evil()}, sample(out, 0))
    index, _, what = the_finding(out)
    assert index == 0
    assert "cannot be loaded" in what or what.startswith("cut")
    assert not (tmp_path / "ran").exists()


# Next tokens


def last_record(out: Path, index: int) -> Any:
    return read_manifests(out)[0].samples[index]


def test_a_next_token_that_the_last_state_does_not_yield_is_named(out: Path) -> None:
    record = last_record(out, 6)
    wrong = folders.with_token(record.proof, (record.proof.top + 1) % 384)
    folders.rewrite_record(out, record, proof=wrong)
    index, kind, what = the_finding(out)
    assert (index, kind) == (6, "next token")
    assert f"yields token {record.proof.top}, the engine sampled {wrong.next_token}" in what


def test_next_tokens_find_states_that_were_wrong_when_they_were_written(
    model: Path, tmp_path: Path
) -> None:
    out = folders.write_extraction(model, tmp_path / "out")
    # The file and its checksums agree, and go back to another layer.
    content = load(sample(out, 4))
    content["hidden_states"][3] = 1.5 * content["hidden_states"][0]
    save(sample(out, 4), content)
    wrong = folders.sample_record(model, out / "hidden_states", 4)
    folders.rewrite_record(out, wrong)
    assert the_finding(out)[:2] == (4, "next token")


def test_states_that_two_samples_were_written_with_are_named(model: Path, tmp_path: Path) -> None:
    out = folders.write_extraction(model, tmp_path / "out")
    states = load(sample(out, 0))["hidden_states"]
    change(sample(out, 2), lambda content: content.update(hidden_states=states))
    # The record agrees with the file, and the next token is that of these states.
    record = folders.sample_record(model, out / "hidden_states", 2)
    folders.rewrite_record(out, record, proof=folders.with_token(record.proof, record.proof.top))
    assert the_finding(out) == (2, "another sample", "has the states of sample 0, of other tokens")


def test_the_same_tokens_may_have_the_same_states(model: Path, tmp_path: Path) -> None:
    out = folders.write_extraction(model, tmp_path / "out")
    # Sample 2 becomes sample 0 with another loss mask.
    content = load(sample(out, 0))
    content["loss_mask"] = 1 - content["loss_mask"]
    save(sample(out, 2), content)
    record = folders.sample_record(model, out / "hidden_states", 2)
    token = folders.with_token(record.proof, record.proof.top)
    folders.rewrite_record(out, record, proof=token)
    findings = listed(audit(AuditSettings(out)))
    assert [what for sample, _, what in findings if sample is not None] == []


def test_a_checkpoint_that_is_gone_is_said_not_to_be_checked(out: Path, tmp_path: Path) -> None:
    manifest = out / "manifest-0-of-1.jsonl"
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    rows[0]["model"] = str(tmp_path / "gone")
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = audit(AuditSettings(out))
    assert report.right
    assert "is not there (name it with --model)" in report.not_checked[0]


def test_a_checkpoint_of_another_width_is_bad_input(out: Path, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    weights = {"model.norm.weight": torch.ones(64), "lm_head.weight": torch.ones(384, 64)}
    config = {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 384, "rms_norm_eps": 1e-5}
    (tmp_path / "other").mkdir()
    save_file(weights, tmp_path / "other" / "model.safetensors")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"has hidden size 64, .* name the verifier"):
        audit(AuditSettings(out, model=tmp_path / "other"))


def test_another_checkpoint_of_the_same_shape_is_named(
    out: Path, model: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = other / "config.json"
    config.write_text(config.read_text() + " ")
    (finding,) = audit(AuditSettings(out, model=other)).findings
    assert (finding.place, finding.kind) == (str(other), "checkpoint")


# The folder


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("hidden_states/data_8.pt", "stray file", "is numbered outside the data set of 8 samples"),
        ("hidden_states/data_007.pt", "stray file", "is no sample of the manifest"),
        ("hidden_states/more/data_3.pt", "stray file", "is no sample of the manifest"),
        ("hidden_states/notes.txt", "stray file", "is no sample of the manifest"),
        ("set_aside/data_3.pt", "stray file", "sample 3 was not set aside"),
        ("token_freq.pt", "stray file", "is no file of an extraction"),
        ("unfinished/0-of-1/data_5.pt", "unfinished", "was being written when its run ended"),
    ],
)
def test_a_stray_file_is_named(out: Path, name: str, kind: str, what: str) -> None:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).touch()
    (finding,) = audit(AuditSettings(out)).findings
    assert (finding.place, finding.kind, finding.what) == (name, kind, what)


def test_samples_that_are_still_to_be_extracted_are_named(out: Path) -> None:
    manifest = out / "manifest-0-of-1.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(lines[:6]))  # the run, and samples 0 to 4
    findings = listed(audit(AuditSettings(out)))
    assert (None, "unfinished", "3 samples are still to be extracted: 5-7") in findings
    strays = [what for _, kind, what in findings if kind == "stray file"]
    assert strays == [f"no manifest records sample {index}" for index in (5, 6, 7)]


def test_a_sample_that_was_set_aside_is_named_with_its_reason(out: Path) -> None:
    (out / "set_aside").mkdir()
    sample(out, 1).rename(sample_path(out / "set_aside", 1))
    folders.rewrite_record(out, last_record(out, 1), reason="not finite")
    assert the_finding(out) == (1, "set aside", "not finite")


def test_runs_that_extracted_other_layers_are_named(out: Path, model: Path) -> None:
    run = replace(folders.run_record(model, "float32", (0, 1)), run=1, layers=(1, 4, 5, 7))
    from eagle3compat.kimi.manifest import ManifestWriter

    ManifestWriter(out / "manifest-0-of-1.jsonl").append([run])
    findings = listed(audit(AuditSettings(out)))
    assert (None, "shard", "runs with several layers: (1, 4, 5, 7) and (2, 4, 5, 7)") in findings


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        audit(AuditSettings(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="holds no manifest and no data_"):
        audit(AuditSettings(tmp_path))


def test_reports_are_json(out: Path) -> None:
    change(sample(out, 4), exchange_layers)
    report = json.loads(json.dumps(audit(AuditSettings(out)).to_json()))
    assert report["right"] is False
    assert report["findings"] == [
        {
            "sample": 4,
            "file": "hidden_states/data_4.pt",
            "kind": "layers",
            "what": "layers 4 and 7 are exchanged",
        }
    ]


# How many are extracted anew


@pytest.mark.parametrize(
    ("share", "count", "expected"),
    [(0, 0, 0), (0.01, 0, 1), (0.5, 0, 4), (1, 0, 8), (0, 3, 3), (0, 20, 8), (0.5, 6, 6)],
)
def test_a_share_is_rounded_up(share: float, count: int, expected: int) -> None:
    settings = AuditSettings(Path(), again_share=share, again_count=count)
    assert settings.again_of(8) == expected


def test_extracting_anew_without_builds_is_bad_input(out: Path, monkeypatch: Any) -> None:
    from eagle3compat.errors import BuildNotFoundError
    from eagle3compat.kimi import anew

    def none(package: str) -> None:
        raise BuildNotFoundError(package)

    monkeypatch.setattr(anew, "find_build", none)
    with pytest.raises(BuildNotFoundError, match="speculators"):
        audit(AuditSettings(out, again_count=1))
