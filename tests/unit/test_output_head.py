"""The final norm and lm_head of a checkpoint, and what rounding explains of a next token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.errors import InputError
from eagle3compat.kimi.output_head import open_output_head
from eagle3compat.reference import ReferenceModel
from eagle3compat.tiny import Variant, write_tiny_kimi

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file

WIDTH, TOKENS = 8, 20
CONFIG = {"hidden_size": WIDTH, "vocab_size": TOKENS, "rms_norm_eps": 1e-5}


def checkpoint(
    folder: Path, weights: Mapping[str, Any], config: Mapping[str, Any], index: bool = False
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "part.safetensors")
    if index:
        weight_map = dict.fromkeys(weights, "part.safetensors")
        content = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(content)
    return folder


def drawn(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("variant", [Variant(), Variant(text_only=True)])
def test_the_head_yields_the_logits_of_the_model(variant: Variant, tmp_path: Path) -> None:
    write_tiny_kimi(tmp_path / "tiny", variant=variant)
    model = ReferenceModel.load(tmp_path / "tiny")
    tokens = [5, 300, 17, 256, 90, 341, 2]
    (states,) = model.hidden_states([tokens], [7])
    (logits,) = model.logits([tokens])
    head = open_output_head(tmp_path / "tiny")
    assert (head.hidden_size, head.vocab_size) == (128, logits.shape[1])
    found = head.normalize(states[0]) @ head.rows(torch.arange(384), torch.float32).T
    assert torch.allclose(found, logits, rtol=1e-4, atol=1e-4)
    tops = logits.argmax(dim=-1).tolist()
    proofs = head.judge(states[0], tops)
    assert [proof.top for proof in proofs] == tops
    assert all(proof.shortfall == 0 and proof.holds for proof in proofs)


def test_the_second_best_token_does_not_hold(tmp_path: Path) -> None:
    write_tiny_kimi(tmp_path / "tiny")
    model = ReferenceModel.load(tmp_path / "tiny")
    (states,) = model.hidden_states([list(range(40))], [7])
    (logits,) = model.logits([list(range(40))])
    top, second = logits.topk(2, dim=-1).values.T
    head = open_output_head(tmp_path / "tiny")
    proofs = head.judge(states[0], logits.topk(2, dim=-1).indices[:, 1].tolist())
    for proof, gap in zip(proofs, (top - second).tolist(), strict=True):
        assert proof.shortfall == pytest.approx(gap, rel=1e-3, abs=1e-4)
        assert proof.holds == (proof.shortfall <= proof.allowed)
    assert not any(proof.holds for proof in proofs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_an_engine_rounds_is_explained_and_no_more(dtype: str) -> None:
    """An engine that rounds wherever the module says it may, on logits that are as near as can be:
    its token always holds, and the bound is not so wide that a token further down does."""
    from eagle3compat.kimi.output_head import OutputHead

    width, count, kind = 512, 2000, getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(count, width, generator=generator).to(kind)
    weight = (1 + 0.1 * torch.randn(width, generator=generator)).to(kind)
    hidden = 3 * torch.randn(400, width, generator=generator)
    states = hidden.to(kind)

    class InMemory(OutputHead):
        def rows(self, tokens: Any, dtype: Any) -> Any:
            return matrix[tokens].float()

        def _largest(self, normalized: Any, dtype: Any) -> Any:
            values, places = (normalized @ matrix.float().T).max(dim=-1)
            return places, values

    head = InMemory(weight.float(), 1e-5, Path(), "", count)
    # Unlike the stored states, those that this engine norms were never rounded.
    normed = hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + 1e-5)
    normed = (normed.to(kind) * weight).to(kind)
    logits = (normed.float() @ matrix.float().T).to(kind)
    proofs = head.judge(states, logits.float().argmax(dim=-1).tolist())
    assert any(proof.next_token != proof.top for proof in proofs)
    assert all(proof.holds for proof in proofs)
    tenth = logits.float().topk(10, dim=-1).indices[:, 9].tolist()
    held = sum(proof.holds for proof in head.judge(states, tenth))
    assert held < 0.05 * len(tenth)


@pytest.mark.parametrize("index", [False, True])
def test_tied_embeddings_are_the_output_matrix(tmp_path: Path, index: bool) -> None:
    weights = {"model.norm.weight": drawn(WIDTH), "model.embed_tokens.weight": drawn(TOKENS, WIDTH)}
    config = {**CONFIG, "tie_word_embeddings": True}
    head = open_output_head(checkpoint(tmp_path / "tied", weights, config, index))
    assert head.matrix_name == "model.embed_tokens.weight"
    plain = {**weights, "lm_head.weight": drawn(TOKENS, WIDTH)}
    head = open_output_head(checkpoint(tmp_path / "plain", plain, CONFIG, index))
    assert head.matrix_name == "lm_head.weight"
    # A tied model that kept its lm_head nonetheless does not use it.
    head = open_output_head(checkpoint(tmp_path / "both", plain, config, index))
    assert head.matrix_name == "model.embed_tokens.weight"


def test_rows_beyond_the_vocabulary_are_no_tokens(tmp_path: Path) -> None:
    matrix = drawn(TOKENS + 4, WIDTH)
    matrix[TOKENS:] = 100.0
    weights = {"model.norm.weight": torch.ones(WIDTH), "lm_head.weight": matrix}
    head = open_output_head(checkpoint(tmp_path / "padded", weights, CONFIG))
    (proof,) = head.judge(torch.ones(1, WIDTH), [0])
    assert proof.top < TOKENS
    with pytest.raises(InputError, match="outside the vocabulary"):
        head.judge(torch.ones(1, WIDTH), [TOKENS])


@pytest.mark.parametrize(
    ("weights", "config", "fault"),
    [
        ({"model.norm.weight": (WIDTH,)}, CONFIG, "embed_tokens.weight"),
        ({"model.norm.weight": (WIDTH,), "lm_head.weight_packed": (TOKENS, 1)}, CONFIG, "plain"),
        ({"lm_head.weight": (TOKENS, WIDTH)}, CONFIG, "norm.weight"),
        ({"model.norm.weight": (4,), "lm_head.weight": (TOKENS, WIDTH)}, CONFIG, "8 wide"),
        (
            {"model.norm.weight": (WIDTH,), "lm_head.weight": (TOKENS, WIDTH)},
            {**CONFIG, "model_type": "gemma3_text"},
            "no plain final RMS norm",
        ),
        (
            {"model.norm.weight": (WIDTH,), "lm_head.weight": (TOKENS, WIDTH)},
            {"vocab_size": TOKENS},
            "rms_norm_eps None",
        ),
    ],
)
def test_a_checkpoint_that_keeps_them_otherwise_is_refused(
    tmp_path: Path, weights: dict[str, Any], config: Any, fault: str
) -> None:
    tensors = {name: drawn(*shape) for name, shape in weights.items()}
    with pytest.raises(InputError, match=fault):
        open_output_head(checkpoint(tmp_path / "odd", tensors, config))


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    weights = {"model.norm.weight": drawn(WIDTH), "lm_head.weight": drawn(TOKENS, WIDTH)}
    folder = checkpoint(tmp_path / "cut", weights, CONFIG)
    file = folder / "part.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match=r"part\.safetensors: no safetensors file"):
        open_output_head(folder)
