"""Writes the tiny Kimi-K2.5: all of its files, or nothing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.tiny.configuration import (
    Variant,
    generation_configuration,
    image_processor_configuration,
    model_configuration,
    tokenizer_configuration,
)
from eagle3compat.tiny.safetensors_file import Tensor, write_safetensors
from eagle3compat.tiny.vocabulary import tiktoken_ranks
from eagle3compat.tiny.weights import draw_weights

TOKENIZER_CODE = ("tokenization_kimi.py", "chat_template.jinja")
MODEL_CODE = ("configuration_kimi_k25.py", "kimi_k25_vision_processing.py")
SHARD_COUNT = 2


def write_tiny_kimi(directory: Path, *, seed: int = 0, variant: Variant | None = None) -> None:
    """Writes a random Kimi-K2.5 of 8 layers that vLLM and transformers load, in about a second.

    The same seed and variant give the same bytes on every machine. The folder appears under its
    name once it is complete: a run that is stopped leaves no half of a checkpoint.

    Args:
        directory: the folder to write; it must not exist, or be empty. Its parents are made.
        seed: which random weights, 0 or more.
        variant: which checkpoint; the multimodal one if not given.

    Raises:
        InputError: the folder is in use or cannot be written, the seed is negative, the variant
            is learnable with YaRN, or NumPy is not installed.
    """
    if seed < 0:
        raise InputError(f"seed: expected 0 or more, found {seed}. Choose another seed.")
    if find_spec("numpy") is None:
        raise InputError(
            "tiny Kimi-K2.5: expected NumPy, which draws its weights, found none. "
            "Install it: pip install numpy."
        )
    if variant is not None and variant.learnable and variant.yarn:
        raise InputError(
            "tiny Kimi-K2.5: learnable and yarn do not go together (it tells distances by rotary "
            "coordinates as they are). Leave one of them out."
        )
    target = directory.resolve()
    _refuse_if_in_use(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as staging:
            folder = Path(staging) / "checkpoint"
            folder.mkdir()
            _write_files(folder, seed, variant or Variant())
            folder.replace(target)
    except OSError as error:
        raise InputError(
            f"{target}: expected a folder that can be written, found: {error}. "
            "Choose another folder."
        ) from error


def _refuse_if_in_use(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        kind = "a folder with files in it" if target.is_dir() else "a file"
        raise InputError(
            f"{target}: expected a new or an empty folder, found {kind}. "
            "Choose another folder, or remove this one."
        )


def _write_files(folder: Path, seed: int, variant: Variant) -> None:
    _write_json(folder / "config.json", model_configuration(variant))
    _write_json(folder / "generation_config.json", generation_configuration())
    _write_json(folder / "tokenizer_config.json", tokenizer_configuration())
    (folder / "tiktoken.model").write_text(tiktoken_ranks(), encoding="ascii")
    _copy_code(folder, TOKENIZER_CODE)
    if not variant.text_only:
        _write_json(folder / "preprocessor_config.json", image_processor_configuration())
        _copy_code(folder, MODEL_CODE)
    _write_weights(folder, draw_weights(variant, seed))


def _copy_code(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        source = resources.files("eagle3compat.tiny") / "remote" / name
        (folder / name).write_bytes(source.read_bytes())


def _write_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes the tensors in shards with an index, as a checkpoint too large for one file has it."""
    total = sum(len(tensor.data) for tensor in weights.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARD_COUNT)]
    written = 0
    for name, tensor in weights.items():
        shards[written * SHARD_COUNT // total][name] = tensor
        written += len(tensor.data)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{SHARD_COUNT:05}.safetensors"
        write_safetensors(folder / file_name, shard)
        weight_map.update(dict.fromkeys(shard, file_name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
