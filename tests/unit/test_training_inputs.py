"""What a training is given: the samples, their layers, the settings; and what is refused first."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from command_line import call, lay_out_builds, the_error
from hypothesis import given
from hypothesis import strategies as st

from eagle3compat.errors import InputError
from eagle3compat.kimi import training
from eagle3compat.kimi.draft_trainer import PartsOfEpochs, complete_config
from eagle3compat.kimi.manifest import RunRecord, SampleRecord, input_digest
from eagle3compat.kimi.training import Settings, split, train_draft
from eagle3compat.kimi.training_data import find_layers, find_samples, read_samples
from eagle3compat.kimi.verifier import read_verifier

CONFIG = {
    "num_hidden_layers": 8, "hidden_size": 4, "vocab_size": 100, "num_attention_heads": 2,
    "intermediate_size": 8,
}  # fmt: skip
LAYERS = (2, 4, 5, 7)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint, and an extraction of two samples without a manifest."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "states" / "hidden_states").mkdir(parents=True)
    for index in (0, 10, 2):
        (tmp_path / "states" / "hidden_states" / f"data_{index}.pt").touch()
    return tmp_path


def settings(place: Path, **others: Any) -> Settings:
    usual = Settings(place / "model", place / "states", place / "draft", layers=LAYERS)
    return replace(usual, **others)


# --- where the samples are, and of which layers --------------------------------------------------


def write_manifest(place: Path, *indices: int, layers: tuple[int, ...] = LAYERS) -> None:
    run = RunRecord(
        run=0, started=0.0, builds={}, shims=(), model="model", model_digest="", layers=layers,
        hidden_size=4, dtype="float32", data="data", samples=5, data_digest="", shard=(0, 1),
        settings={},
    )  # fmt: skip
    lines = [{"kind": "run", **asdict(run)}]
    for index in indices:
        digest = input_digest(range(3), (0, 1, 1))
        sample = SampleRecord(index, index + 1, digest, 3, 9, (1.0,), ("",), None, 0, 0.0)
        lines.append({"kind": "sample", **asdict(sample)})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (place / "states" / "manifest-0-of-1.jsonl").write_text(text)


def test_samples_come_in_the_order_of_their_numbers(place: Path) -> None:
    found = find_samples(place / "states")
    assert [path.name for path in found.files] == ["data_0.pt", "data_2.pt", "data_10.pt"]
    assert found.expected is None
    assert find_samples(place / "states" / "hidden_states").files == found.files


def test_only_what_the_manifest_calls_done_is_trained_on(place: Path) -> None:
    write_manifest(place, 0, 10)
    found = find_samples(place / "states")
    assert [path.name for path in found.files] == ["data_0.pt", "data_10.pt"]
    assert found.expected == 5


def test_a_sample_that_is_done_and_gone_is_named(place: Path) -> None:
    write_manifest(place, 0, 7)
    with pytest.raises(InputError, match=r"data_7\.pt is done by the manifest and not there"):
        find_samples(place / "states")


@pytest.mark.parametrize("folder", ["model", "states/hidden_states/data_0.pt", "nowhere"])
def test_a_folder_without_samples_is_refused(place: Path, folder: str) -> None:
    with pytest.raises(InputError, match="--hidden-states"):
        find_samples(place / folder)


def test_layers_are_those_of_the_manifest(place: Path) -> None:
    verifier = read_verifier(place / "model")
    write_manifest(place, 0)
    assert find_layers(place / "states", verifier, None) == LAYERS
    assert find_layers(place / "states", verifier, LAYERS) == LAYERS
    with pytest.raises(InputError, match="was extracted from layers"):
        find_layers(place / "states", verifier, (2, 3, 5, 7))


def test_layers_are_those_of_speculators_own_record(place: Path) -> None:
    config = {"hidden_states": {"layer_ids": list(LAYERS)}}
    path = place / "states" / "data_config.json"
    path.write_text(json.dumps(config))
    verifier = read_verifier(place / "model")
    assert find_layers(place / "states", verifier, None) == LAYERS
    path.write_text("{}")
    with pytest.raises(InputError, match=r"data_config\.json: expected layer ids"):
        find_layers(place / "states", verifier, None)


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        (None, "name them with --layers"),
        ((2, 4, 7), "takes 3 auxiliary ones and the target"),
        ((2, 3, 4, 5, 7), "takes 3 auxiliary ones and the target"),
        ((2, 4, 5, 6), "has to be the verifier's last, 7"),
        ((7, 2, 4, 5), "has to be the verifier's last, 7"),
        ((2, 4, 5, 8), "out of range"),
        ((2, 2, 5, 7), "repeated"),
    ],
)
def test_layers_that_no_draft_can_be_trained_on_are_refused(
    place: Path, layers: tuple[int, ...] | None, fault: str
) -> None:
    with pytest.raises(InputError, match=fault):
        find_layers(place / "states", read_verifier(place / "model"), layers)


def write_sample(path: Path, tokens: int = 3, **others: Any) -> None:
    torch = pytest.importorskip("torch")
    sample = {
        "input_ids": torch.arange(tokens),
        "loss_mask": torch.tensor([0] + [1] * (tokens - 1)),
        "hidden_states": [torch.zeros(tokens, 4) for _ in LAYERS],
    }
    torch.save(sample | others, path)


def test_samples_are_counted_and_their_states_not_read(place: Path) -> None:
    for path in find_samples(place / "states").files:
        write_sample(path)
    data = read_samples(find_samples(place / "states"), read_verifier(place / "model"), 4)
    assert data.lengths == (3, 3, 3)
    assert data.counts == {1: 3, 2: 3}


def test_a_sample_of_another_input_than_the_manifests_is_named(place: Path) -> None:
    torch = pytest.importorskip("torch")
    write_manifest(place, 0, 2)
    verifier = read_verifier(place / "model")
    first, second = find_samples(place / "states").files
    write_sample(first)
    write_sample(second)
    assert read_samples(find_samples(place / "states"), verifier, 4).lengths == (3, 3)
    write_sample(second, loss_mask=torch.tensor([1, 1, 1]))
    with pytest.raises(InputError, match=r"data_2\.pt: holds another input"):
        read_samples(find_samples(place / "states"), verifier, 4)


def test_a_sample_that_is_another_verifiers_is_named(place: Path) -> None:
    torch = pytest.importorskip("torch")
    files = find_samples(place / "states").files
    for path in files:
        write_sample(path)
    verifier = read_verifier(place / "model")
    for fault, others in {
        "expected 4 layers of 3 x 4": {"hidden_states": [torch.zeros(3, 4)] * 3},
        "found .*3, 5": {"hidden_states": [torch.zeros(3, 5)] * 4},
        "token id 100 is outside": {"input_ids": torch.tensor([1, 100, 2])},
        "no sample that the trainer reads": {"loss_mask": None},
    }.items():
        write_sample(files[1], **others)
        with pytest.raises(InputError, match=rf"data_2\.pt: .*{fault}"):
            read_samples(find_samples(place / "states"), verifier, 4)
    files[1].write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"data_2\.pt: no sample"):
        read_samples(find_samples(place / "states"), verifier, 4)


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "fault"),
    [
        ({"epochs": 0}, "--epochs 0"),
        ({"checkpoints_per_epoch": 0}, "--checkpoints-per-epoch 0"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
        ({"sequence_length": 1000}, "multiple of 128"),
        ({"ttt_steps": 0}, "--ttt-steps"),
        ({"num_draft_layers": 0}, "--num-draft-layers"),
        ({"validation_share": 1.0}, "--validation-share"),
        ({"noise": -1.0}, "noise"),
        ({"dtype": "float16"}, "--dtype float16"),
        ({"draft_vocab_size": 101}, "--draft-vocab-size 101"),
        ({"layers": (2, 4, 5)}, "takes 3 auxiliary"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_imported(
    place: Path, others: dict[str, Any], fault: str
) -> None:
    with pytest.raises(InputError, match=fault):
        train_draft(settings(place, **others))
    assert not (place / "draft").exists()


@given(count=st.integers(2, 300), share=st.floats(0, 0.9), seed=st.integers(0, 9))
def test_each_sample_is_trained_on_or_held_back(count: int, share: float, seed: int) -> None:
    try:
        parts = split(count, share, seed)
    except InputError:
        assert max(1, round(share * count)) >= count
        return
    assert sorted(parts[0] + parts[1]) == list(range(count))
    assert bool(parts[1]) is (share > 0)
    assert split(count, share, seed) == parts


def test_a_single_sample_cannot_be_held_back() -> None:
    with pytest.raises(InputError, match="none is left to train on"):
        split(1, 0.1, 0)
    assert split(1, 0.0, 0) == ((0,), ())


class Epochs:
    """A sampler whose epoch e has batches [10 e], [10 e + 1], …"""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Any:
        return iter([[1000 * self._epoch + step] for step in range(self._steps)])


@given(steps=st.integers(1, 40), parts=st.integers(1, 12))
def test_the_parts_of_an_epoch_are_the_epoch(steps: int, parts: int) -> None:
    sampler = PartsOfEpochs(Epochs(steps), parts)
    for epoch in range(2):
        batches: list[list[int]] = []
        for part in range(parts):
            sampler.set_epoch(epoch * parts + part)
            assert len(sampler) == len(list(sampler))
            batches += sampler
        assert batches == [[1000 * epoch + step] for step in range(steps)]


def test_validation_sees_the_same_batches_each_time() -> None:
    sampler = PartsOfEpochs(Epochs(3), 0)
    sampler.set_epoch(7)
    assert list(sampler) == [[0], [1], [2]]


def test_what_speculators_leaves_out_of_the_config_is_spelled_out(place: Path) -> None:
    path = place / "config.json"
    saved = {"transformer_layer_config": {"model_type": "llama"}, "auto_map": {"": "config.X"}}
    path.write_text(json.dumps(saved))
    complete_config(path, settings(place, dtype="float32"))
    config = json.loads(path.read_text())
    assert "auto_map" not in config
    assert config["dtype"] == "float32"
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["head_dim"], layer["rope_theta"]) == ("llama", 2, 10000.0)


# --- the draft's folder --------------------------------------------------------------------------


def claim(place: Path, **others: Any) -> None:
    from eagle3compat.kimi.training_data import TrainingData

    data = TrainingData(find_samples(place / "states"), (3, 3, 3), "digest", {1: 1})
    training._claim(settings(place, **others), data, LAYERS)


@pytest.fixture
def draft(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.3.0")
    (place / "draft").mkdir()
    return place / "draft"


def test_a_training_is_gone_on_with_under_the_same_settings_alone(place: Path, draft: Path) -> None:
    claim(place)
    claim(place, device="cpu", loader_workers=3)
    with pytest.raises(InputError, match=r"other settings \(epochs 10, now 11\)"):
        claim(place, epochs=11)


def test_a_folder_of_something_else_is_left_alone(place: Path, draft: Path) -> None:
    (draft / "letter.txt").touch()
    with pytest.raises(InputError, match=r"is in use \(holds letter\.txt\)"):
        claim(place)


def test_a_second_training_in_the_same_folder_is_refused(draft: Path) -> None:
    with (
        training._locked(draft),
        pytest.raises(InputError, match="another training is running in it"),
        training._locked(draft),
    ):
        pass


# --- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options", "fault"),
    [
        ("train", ("--epochs", "0"), "--epochs"),
        ("train", ("--layers", "2,four"), "--layers 2,four: expected integers"),
        ("train", ("--sequence-length", "100"), "multiple of 128"),
        ("train", ("--model", "nowhere"), "no such folder"),
        ("train", ("--hidden-states", "nowhere"), "no such folder"),
        ("train", (), "name them with --layers"),
        ("vocab", ("--data", "rows.jsonl"), "expected one of --hidden-states and --data"),
        ("vocab", ("--draft-vocab-size", "101"), "--draft-vocab-size 101"),
        ("vocab", ("--hidden-states", "model"), "holds no data_0.pt"),
    ],
)
def test_bad_input_is_one_line(
    place: Path, command: str, options: tuple[str, ...], fault: str
) -> None:
    lay_out_builds(place / "builds")
    given = {"--model": "model", "--hidden-states": "states", "--out": "draft"}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    arguments = [part for pair in given.items() for part in pair]
    error = the_error(
        call("-m", "eagle3compat", command, *arguments, builds=place / "builds", folder=place)
    )
    assert fault in error
    assert not (place / "draft").exists()
