"""What a draft's folder says of itself, held against the verifier that it is to serve.

vLLM checks little of this: a draft without layer ids gets the states of default layers, one with
ids that are one off gets those of the layers beside, and both serve without an error, only badly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.verifier import Verifier
from eagle3compat.verifier_parts import default_layers, served_layer_ids

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
TRAINING = "training.json"
"""What `eagle3compat.kimi.training` notes of a training; other drafts have none."""


@dataclass(frozen=True)
class ServedDraft:
    """A draft that vLLM can serve.

    Args:
        path: its folder.
        layer_ids: auxiliary layers as vLLM counts them: i is the input of layer i.
        vocab_size: tokens that it can predict.
        draft_tokens: tokens that it was trained to predict in a row.
    """

    path: Path
    layer_ids: tuple[int, ...]
    vocab_size: int
    draft_tokens: int


def read_served_draft(path: Path, verifier: Verifier) -> ServedDraft:
    """Read a draft's folder, and see that vLLM would serve it as it was trained.

    Args:
        path: folder of a draft in the format of speculators, EAGLE-3.
        verifier: the model that it is to draft for.

    Raises:
        InputError: it is no such draft, its config lacks or contradicts the layer ids, or its sizes
            or its vocabulary are not the verifier's.
    """
    if not path.is_dir():
        raise InputError(f"--draft {path}: no such folder; give the folder of a trained draft")
    config = _read_json(path / CONFIG)
    if config.get("speculators_model_type") != "eagle3":
        raise InputError(
            f"--draft {path}: {CONFIG} says speculators_model_type = "
            f"{config.get('speculators_model_type')!r}, expected 'eagle3'"
        )
    layer_ids = _layer_ids(path, config, verifier)
    shapes = _shapes(path / WEIGHTS)
    vocab_size = _check_sizes(path, config, shapes, len(layer_ids), verifier)
    return ServedDraft(path, layer_ids, vocab_size, _draft_tokens(path, config))


def _layer_ids(path: Path, config: Mapping[str, Any], verifier: Verifier) -> tuple[int, ...]:
    ids = config.get(LAYER_IDS)
    count = verifier.num_hidden_layers
    usual = served_layer_ids(default_layers(count))
    if ids is None:
        raise InputError(
            f"--draft {path}: {CONFIG} has no {LAYER_IDS}, so vLLM would feed it the states of "
            f"its own default layers, one layer before those that speculators extracts; name the "
            f"layers in vLLM's count, one more than extraction's (for its default: {usual})"
        )
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        raise InputError(f"--draft {path}: {LAYER_IDS} = {ids!r}, expected a list of integers")
    if not all(1 <= layer <= count for layer in ids) or ids != sorted(set(ids)):
        raise InputError(
            f"--draft {path}: {LAYER_IDS} = {ids}, expected rising ids from 1 to {count} of "
            f"{verifier.path}: i is the input of layer i, and vLLM sorts them"
        )
    trained = _trained_layers(path)
    if trained is not None and ids != served_layer_ids(trained):
        raise InputError(
            f"--draft {path}: {LAYER_IDS} = {ids}, but by {TRAINING} it was trained on the outputs "
            f"of the layers {trained}, whose ids in vLLM are {served_layer_ids(trained)}"
        )
    return tuple(ids)


def _trained_layers(path: Path) -> list[int] | None:
    """The auxiliary layers that it was trained on, as extraction counts them."""
    file = path / TRAINING
    if not file.exists():
        return None
    layers = _read_json(file).get("layers")
    return layers[:-1] if isinstance(layers, list) else None


def _check_sizes(
    path: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    layer_count: int,
    verifier: Verifier,
) -> int:
    vocab_size = config.get("draft_vocab_size")
    if type(vocab_size) is not int:
        raise InputError(f"--draft {path}: draft_vocab_size = {vocab_size!r}, expected an integer")
    if vocab_size == verifier.vocab_size and "d2t" in shapes:
        raise InputError(
            f"--draft {path}: has all {vocab_size} tokens of {verifier.path} and a map d2t beside, "
            "for which vLLM has no place then; train with a smaller --draft-vocab-size"
        )
    hidden = verifier.hidden_size
    target_vocab = verifier.vocab_size
    expected = {
        "fc.weight": (hidden, layer_count * hidden),
        "lm_head.weight": (vocab_size, hidden),
        "d2t": (vocab_size,),
        "t2d": (target_vocab,),
        "embed_tokens.weight": (target_vocab, hidden),
    }
    for name, shape in expected.items():
        found = shapes.get(name)
        # vLLM shares the verifier's embeddings with a draft that has none, and needs no map
        # where both vocabularies are the same.
        optional = name == "embed_tokens.weight" or (
            name in ("d2t", "t2d") and vocab_size == target_vocab
        )
        if found == shape or (found is None and optional):
            continue
        raise InputError(
            f"--draft {path}: {name} is {'missing' if found is None else list(found)}, expected "
            f"{list(shape)}: {layer_count} auxiliary layers and a hidden size of {hidden}, a "
            f"draft's vocabulary of {vocab_size} and the {target_vocab} tokens of {verifier.path}"
        )
    return vocab_size


def _draft_tokens(path: Path, config: Mapping[str, Any]) -> int:
    try:
        tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        config["speculators_config"]["verifier"]["name_or_path"]
        config["transformer_layer_config"]["model_type"]
    except (KeyError, IndexError, TypeError) as error:
        raise InputError(
            f"--draft {path}: {CONFIG} lacks {error}, which vLLM wants of a draft in the format "
            "of speculators"
        ) from error
    if type(tokens) is not int or tokens < 1:
        raise InputError(f"--draft {path}: speculative_tokens = {tokens!r}, expected 1 or more")
    return tokens


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors, from the head of a safetensors file."""
    try:
        with file.open("rb") as stream:
            # Of a file that is none, this may be any number.
            length = min(int.from_bytes(stream.read(8), "little"), file.stat().st_size)
            head = json.loads(stream.read(length))
        return {
            name: tuple(entry["shape"]) for name, entry in head.items() if name != "__metadata__"
        }
    except FileNotFoundError:
        raise InputError(
            f"--draft {file.parent}: holds no {WEIGHTS}; is its training done?"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"--draft: {file} is no safetensors file ({error!r})") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"--draft {file.parent}: holds no {file.name}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"--draft: {file} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"--draft: {file} holds {type(content).__name__}, expected an object")
    return content
