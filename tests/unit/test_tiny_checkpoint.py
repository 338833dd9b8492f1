"""The tiny Kimi-K2.5's files: the same bytes every time, whole or not at all, and consistent."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_kimi_files import digests, read_json, read_shard, read_weights

from eagle3compat.errors import InputError
from eagle3compat.tiny import Variant, checkpoint, write_tiny_kimi
from eagle3compat.tiny.configuration import text_sizes
from eagle3compat.tiny.routing import ROUTING_GROUPS
from eagle3compat.tiny.vocabulary import (
    FIRST_SPECIAL_TOKEN,
    MARKERS,
    MERGED_PIECES,
    VOCABULARY_SIZE,
    marker_id,
)
from eagle3compat.tiny.weights import LANGUAGE_MODEL_PREFIX

np = pytest.importorskip("numpy")

VARIANTS = {
    "default": Variant(),
    "mla_gpu": Variant(mla_gpu=True),
    "text_only": Variant(text_only=True),
    "yarn": Variant(yarn=True),
    "learnable": Variant(learnable=True),
}

# SHA-256 over the names and digests of all files. A change here changes every checkpoint that
# anybody has compared with: it belongs into the changelog.
GOLDEN = {
    "default": "f12238b248d51da24db55d909b2195ff8aaccc5c5b47a30618444ec3a34c278e",
    "mla_gpu": "77e53ce81f95b1c6e44fb384ffdfae08805bc0b30bc573de8b12839e6edf11b6",
    "text_only": "0bc8d81839133fbcae43077a2e7c86bb905904a4916c8257d170081c68241cc4",
    "yarn": "fe22489bef1090436ae7322dd10f43a8da20f1ae5cdfe54693eff5fa8649c3b5",
    "learnable": "78cc13e33a4c8a5f0c17a07830c0cc9d352b6ec7de7872e05bad885e8b35644c",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for name, variant in VARIANTS.items():
        write_tiny_kimi(root / name, variant=variant)
    return {name: root / name for name in VARIANTS}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_bytes_are_the_recorded_ones(folders: dict[str, Path], name: str) -> None:
    listing = "".join(f"{digest}  {file}\n" for file, digest in digests(folders[name]).items())
    assert hashlib.sha256(listing.encode()).hexdigest() == GOLDEN[name]


def test_writing_twice_gives_the_same_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    write_tiny_kimi(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(folders["default"])


def test_another_seed_changes_the_weights_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    write_tiny_kimi(tmp_path / "other", seed=1)
    ours, other = digests(folders["default"]), digests(tmp_path / "other")
    changed = {file for file in ours if ours[file] != other[file]}
    assert changed == {file for file in ours if file.endswith(".safetensors")}


def test_text_only_holds_the_same_language_model(folders: dict[str, Path]) -> None:
    whole, text = read_weights(folders["default"]), read_weights(folders["text_only"])
    assert {LANGUAGE_MODEL_PREFIX + name for name in text} == {
        name for name in whole if name.startswith(LANGUAGE_MODEL_PREFIX)
    }
    for name, values in text.items():
        assert np.array_equal(values, whole[LANGUAGE_MODEL_PREFIX + name]), name


def test_text_only_needs_no_code_for_its_model(folders: dict[str, Path]) -> None:
    config = read_json(folders["text_only"] / "config.json")
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert "auto_map" not in config
    assert {path.name for path in folders["text_only"].glob("*.py")} == {"tokenization_kimi.py"}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_index_tells_where_every_tensor_is(folders: dict[str, Path], name: str) -> None:
    index = read_json(folders[name] / "model.safetensors.index.json")
    found: dict[str, str] = {}
    size = 0
    for path in sorted(folders[name].glob("*.safetensors")):
        header, data = read_shard(path)
        found.update(dict.fromkeys(header, path.name))
        size += len(data)
    assert found == index["weight_map"]
    assert len(set(found.values())) > 1
    assert size == index["metadata"]["total_size"]


@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_lie_aligned_and_without_gaps(folders: dict[str, Path], name: str) -> None:
    widths = {"BF16": 2, "F32": 4}
    for path in folders[name].glob("*.safetensors"):
        header, data = read_shard(path)
        assert (path.stat().st_size - len(data)) % 8 == 0
        end = 0
        for tensor, entry in header.items():
            start, stop = entry["data_offsets"]
            assert start == end, tensor
            assert start % widths[entry["dtype"]] == 0, tensor
            assert stop - start == widths[entry["dtype"]] * int(np.prod(entry["shape"])), tensor
            end = stop
        assert end == len(data)


@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_follow_the_configuration(folders: dict[str, Path], name: str) -> None:
    config = read_json(folders[name] / "config.json")
    text = config.get("text_config", config)
    prefix = "" if VARIANTS[name].text_only else LANGUAGE_MODEL_PREFIX
    shapes = {key: values.shape for key, values in read_weights(folders[name]).items()}
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    attention = f"{prefix}model.layers.0.self_attn."
    query_width = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
    key_value_width = text["qk_nope_head_dim"] + text["v_head_dim"]
    assert shapes[f"{prefix}model.embed_tokens.weight"] == (text["vocab_size"], hidden)
    assert shapes[f"{attention}q_b_proj.weight"] == (heads * query_width, text["q_lora_rank"])
    assert shapes[f"{attention}kv_a_proj_with_mqa.weight"] == (
        text["kv_lora_rank"] + text["qk_rope_head_dim"],
        hidden,
    )
    assert shapes[f"{attention}kv_b_proj.weight"] == (
        heads * key_value_width,
        text["kv_lora_rank"],
    )
    assert shapes[f"{attention}o_proj.weight"] == (hidden, heads * text["v_head_dim"])
    dense = {
        layer
        for layer in range(text["num_hidden_layers"])
        if f"{prefix}model.layers.{layer}.mlp.gate_proj.weight" in shapes
    }
    assert dense == set(range(text["first_k_dense_replace"]))
    for layer in set(range(text["num_hidden_layers"])) - dense:
        mlp = f"{prefix}model.layers.{layer}.mlp."
        assert shapes[f"{mlp}gate.weight"] == (text["n_routed_experts"], hidden)
        for expert in range(text["n_routed_experts"]):
            down = shapes[f"{mlp}experts.{expert}.down_proj.weight"]
            assert down == (hidden, text["moe_intermediate_size"])


def test_mla_gpu_has_the_head_size_that_mla_kernels_take() -> None:
    sizes = text_sizes(Variant(mla_gpu=True))
    assert (sizes.kv_lora_rank, sizes.qk_rope_head_dim) == (512, 64)
    assert (sizes.qk_nope_head_dim, sizes.v_head_dim) == (128, 128)


def test_yarn_stretches_the_context_by_its_factor(folders: dict[str, Path]) -> None:
    text = read_json(folders["yarn"] / "config.json")["text_config"]
    scaling = text["rope_scaling"]
    stretched = scaling["factor"] * scaling["original_max_position_embeddings"]
    assert stretched == text["max_position_embeddings"]
    assert read_json(folders["default"] / "config.json")["text_config"]["rope_scaling"] is None


def test_the_token_ids_agree_in_all_files(folders: dict[str, Path]) -> None:
    folder = folders["default"]
    config = read_json(folder / "config.json")
    tokens = read_json(folder / "tokenizer_config.json")
    named = {entry["content"]: int(i) for i, entry in tokens["added_tokens_decoder"].items()}
    assert config["media_placeholder_token_id"] == named["<|media_pad|>"]
    for holder in (config, config["text_config"], read_json(folder / "generation_config.json")):
        for kind in ("bos", "eos", "pad"):
            assert holder[f"{kind}_token_id"] == named[tokens[f"{kind}_token"]]
    ranks = (folder / "tiktoken.model").read_text().splitlines()
    assert len(ranks) == FIRST_SPECIAL_TOKEN
    assert config["text_config"]["vocab_size"] == VOCABULARY_SIZE


def test_markers_follow_the_ranks_and_are_distinct() -> None:
    ids = [marker_id(marker) for marker in MARKERS]
    assert len(set(ids)) == len(ids)
    assert min(ids) == FIRST_SPECIAL_TOKEN
    assert max(ids) == VOCABULARY_SIZE - 1


def test_every_piece_is_reached_by_merging_two_earlier_ones() -> None:
    known = {bytes([value]) for value in range(256)}
    for piece in (text.encode() for text in MERGED_PIECES):
        assert piece not in known
        assert any(piece[:cut] in known and piece[cut:] in known for cut in range(1, len(piece))), (
            piece
        )
        known.add(piece)


def _sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-values))


@pytest.mark.parametrize("name", VARIANTS)
def test_rounding_cannot_change_which_experts_a_token_goes_to(
    folders: dict[str, Path], name: str
) -> None:
    weights = read_weights(folders[name])
    gates = [key for key in weights if key.endswith("mlp.gate.weight")]
    assert len(gates) == 7
    for gate in gates:
        assert not weights[gate][:, ROUTING_GROUPS:].any()
        bias = weights[gate.replace("gate.weight", "gate.e_score_correction_bias")]
        # What the norm leaves of the routing coordinate: 4 over a root mean square of 1 to 8.
        for routing_value in (0.5, 1.0, 4.0):
            scores = _sigmoid(weights[gate][:, :ROUTING_GROUPS] * routing_value) + bias[:, None]
            ranked = np.sort(scores, axis=0)
            assert (ranked[-2] - ranked[-3]).min() > 0.02


def test_every_expert_is_used_in_every_layer(folders: dict[str, Path]) -> None:
    weights = read_weights(folders["default"])
    for gate in (key for key in weights if key.endswith("mlp.gate.weight")):
        chosen = weights[gate][:, :ROUTING_GROUPS].argsort(axis=0)[-2:]
        assert set(chosen.flatten()) == set(range(8)), gate


def test_no_layer_writes_to_the_routing_coordinates(folders: dict[str, Path]) -> None:
    weights = read_weights(folders["default"])
    writers = [
        key
        for key in weights
        if key.startswith(LANGUAGE_MODEL_PREFIX)
        and key.endswith(("o_proj.weight", "down_proj.weight"))
    ]
    assert len(writers) == 8 + 1 + 7 * 9
    for key in writers:
        assert not weights[key][:ROUTING_GROUPS].any(), key
        assert weights[key][ROUTING_GROUPS:].any(), key


def test_a_folder_with_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="a folder with files in it"):
        write_tiny_kimi(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(InputError, match="found a file"):
        write_tiny_kimi(tmp_path / "model")


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="expected a folder that can be written"):
        write_tiny_kimi(tmp_path / "file" / "model")


def test_an_empty_folder_is_filled_and_parents_are_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_tiny_kimi(tmp_path / "empty")
    write_tiny_kimi(tmp_path / "a" / "b")
    assert digests(tmp_path / "empty") == digests(tmp_path / "a" / "b")


def test_the_folder_can_be_read_by_others_as_any_new_folder(tmp_path: Path) -> None:
    write_tiny_kimi(tmp_path / "model")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_negative_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="seed: expected 0 or more, found -1"):
        write_tiny_kimi(tmp_path / "model", seed=-1)


def test_a_learnable_one_with_yarn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="learnable and yarn do not go together"):
        write_tiny_kimi(tmp_path / "model", variant=Variant(learnable=True, yarn=True))


@contextmanager
def _disk_that_fills_up() -> Iterator[pytest.MonkeyPatch]:
    def fail(path: Path, tensors: object) -> None:
        path.write_bytes(b"half of a file")
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_safetensors", fail)
        yield patch


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with _disk_that_fills_up(), pytest.raises(InputError, match="No space left on device"):
        write_tiny_kimi(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


KILLED_AT_THE_FIRST_SHARD = """
import os, signal, sys
from pathlib import Path
from eagle3compat.tiny import checkpoint
checkpoint.write_safetensors = lambda path, tensors: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.write_tiny_kimi(Path(sys.argv[1]))
"""


def test_a_run_that_is_killed_leaves_no_checkpoint_and_can_be_repeated(tmp_path: Path) -> None:
    target = tmp_path / "model"
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_THE_FIRST_SHARD, str(target)])
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    write_tiny_kimi(target)
    assert (target / "config.json").exists()


def test_bfloat16_rounds_to_nearest_and_ties_to_even() -> None:
    from eagle3compat.tiny.safetensors_file import bfloat16

    # 1 + 1/256 lies half-way between 1 and 1 + 1/128, 1 + 3/256 between 1 + 1/128 and 1 + 2/128.
    exact = np.array([1.0, 1 + 1 / 256, 1 + 3 / 256, -(1 + 1 / 256 + 2**-20), 0.0])
    rounded = np.frombuffer(bfloat16(exact).data, dtype="<u2").astype(np.uint32) << np.uint32(16)
    assert rounded.view(np.float32).tolist() == [1.0, 1.0, 1 + 2 / 128, -(1 + 1 / 128), 0.0]
