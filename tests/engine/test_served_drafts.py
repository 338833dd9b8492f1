"""A draft in real vLLM: one that knows nothing changes no text, and is never right.

Where the installed vLLM takes no draft on a CPU, that is found before an engine starts;
EAGLE3COMPAT_SERVING_PYTHON then names the interpreter of an environment whose vLLM does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.errors import InputError
from eagle3compat.kimi.other_drafts import write_untrained_draft
from eagle3compat.kimi.serving import (
    Acceptance,
    ServingSettings,
    check_takes_drafts,
    find_serving_build,
    measure_acceptance,
)
from eagle3compat.kimi.verifier import read_verifier
from eagle3compat.tiny import Variant, write_tiny_kimi
from eagle3compat.tiny.learnable import ALPHABET, continue_text
from eagle3compat.tiny.vocabulary import marker_id

pytestmark = pytest.mark.engine

PROMPTS = [
    [*map(ord, f"user assistant {word}"), marker_id("<think>"), marker_id("</think>")]
    for word in ("qv", "kw", "zeb", "ox")
]
NEW_TOKENS = 30
PYTHON = os.environ.get("EAGLE3COMPAT_SERVING_PYTHON")


@pytest.fixture(scope="module")
def learnable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving") / "learnable"
    write_tiny_kimi(folder, variant=Variant(learnable=True))
    return folder


@pytest.fixture(scope="module")
def draft(learnable: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of the alphabet that learnt nothing."""
    folder = tmp_path_factory.mktemp("draft")
    write_blank_draft(folder / "blank", learnable)
    write_untrained_draft(learnable, folder / "blank", folder / "untrained")
    return folder / "untrained"


def write_blank_draft(folder: Path, model: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from eagle3compat.kimi.draft import draft_layer_sizes

    verifier = read_verifier(model)
    sizes = {**draft_layer_sizes(model, 1), "model_type": "llama"}
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    heads = sizes["num_attention_heads"] * sizes["head_dim"]
    tokens = sorted(map(ord, ALPHABET))
    shapes = {
        "fc": (hidden, 3 * hidden),
        "layers.0.hidden_norm": (hidden,),
        "layers.0.input_layernorm": (hidden,),
        "layers.0.post_attention_layernorm": (hidden,),
        **{f"layers.0.self_attn.{name}_proj": (heads, 2 * hidden) for name in "qkv"},
        "layers.0.self_attn.o_proj": (hidden, heads),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
        "norm": (hidden,),
        "lm_head": (len(tokens), hidden),
        "embed_tokens": (verifier.vocab_size, hidden),
    }
    tensors = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tensors["t2d"] = torch.zeros(verifier.vocab_size, dtype=torch.bool)
    tensors["t2d"][tokens] = True
    tensors["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(tokens),
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [3, 5, 6],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(model), "architectures": []},
        },
        "transformer_layer_config": sizes,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def takes_drafts() -> bool:
    try:
        check_takes_drafts(find_serving_build(Path(PYTHON) if PYTHON else None))
    except InputError:
        return False
    return True


@pytest.fixture(scope="module")
def served(learnable: Path, draft: Path) -> Acceptance:
    if not takes_drafts():
        pytest.skip("this vLLM takes no draft on a CPU")
    settings = ServingSettings(
        model=learnable,
        drafts={"untrained": draft},
        prompts=PROMPTS,
        new_tokens=NEW_TOKENS,
        dtype="float32",
        python=Path(PYTHON) if PYTHON else None,
    )
    (figures,) = measure_acceptance(settings)
    return figures


def test_a_vllm_that_takes_no_draft_is_refused(learnable: Path, draft: Path) -> None:
    if takes_drafts():
        pytest.skip("this vLLM takes drafts")
    with pytest.raises(InputError, match="takes no draft on a CPU"):
        measure_acceptance(ServingSettings(learnable, {"untrained": draft}, PROMPTS))


def test_the_text_is_the_verifiers(served: Acceptance) -> None:
    assert list(map(list, served.texts)) == [
        continue_text(prompt, NEW_TOKENS) for prompt in PROMPTS
    ]


def test_every_step_drafts_and_an_untrained_draft_is_hardly_ever_right(served: Acceptance) -> None:
    assert served.draft_tokens == 3 * served.drafts
    assert served.accepted_tokens == sum(served.accepted_at)
    # Each step yields the verifier's own token, the first one without a draft.
    steps = len(PROMPTS) * (NEW_TOKENS - 1) - served.accepted_tokens
    assert abs(served.drafts - steps) <= len(PROMPTS)
    assert 1.0 <= served.acceptance_length < 1.2
