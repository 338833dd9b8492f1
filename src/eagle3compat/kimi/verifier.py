"""What a checkpoint says of itself, read from its ``config.json`` without loading anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.verifier_parts import default_layers

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Verifier:
    """The model whose hidden states are extracted.

    Attributes:
        path: the checkpoint's folder.
        num_hidden_layers: decoder layers of the text model.
        hidden_size: width of one hidden state.
        vocab_size: token ids are below it.
        max_position_embeddings: positions that the checkpoint names, or None.
        rope_scaled: whether rotary scaling may stretch those positions.
        dtype: the checkpoint's own dtype (``"bfloat16"``), or None.
        scales_experts: whether routed experts are scaled, which changes float16 hidden states.
    """

    path: Path
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    rope_scaled: bool
    dtype: str | None
    scales_experts: bool

    def default_layers(self) -> tuple[int, ...]:
        """The auxiliary layer ids that speculators 0.3/0.4 take when none are asked for."""
        return (*default_layers(self.num_hidden_layers), self.num_hidden_layers - 1)

    def check_layers(self, asked: Sequence[int] | None) -> tuple[int, ...]:
        """Settle the auxiliary layer ids.

        Args:
            asked: layer ids, each the output of that decoder layer; None for speculators' default.

        Returns:
            The layer ids in the order asked for.

        Raises:
            InputError: no ids, an id outside the model, or one that is repeated.
        """
        layers = self.default_layers() if asked is None else tuple(asked)
        last = self.num_hidden_layers - 1
        outside = [layer for layer in layers if not 0 <= layer <= last]
        repeated = sorted({layer for layer in layers if layers.count(layer) > 1})
        if asked is None and (outside or repeated):
            raise InputError(
                f"{self.path}: speculators' default layer ids {list(layers)} collide or leave a "
                f"model of {self.num_hidden_layers} layers; name distinct ids from 0 to {last} "
                "with --layers"
            )
        if not layers:
            raise InputError(f"--layers: names no layer; give ids from 0 to {last}, as in 2,4,5,7")
        if outside:
            raise InputError(
                f"--layers: {outside} is out of range; {self.path} has layers 0 to {last}"
            )
        if repeated:
            raise InputError(
                f"--layers: {repeated} is repeated; the generator would drop the repeats, "
                "so name each layer once"
            )
        return layers

    def check_dtype(self, dtype: str) -> None:
        """Refuse a dtype in which vLLM's hidden states are not the model's.

        vLLM's DeepSeek layers divide their states by ``routed_scaling_factor`` in float16, to keep
        them in range: what would be extracted is not what a draft meets in serving.
        """
        effective = self.dtype if dtype == "auto" else dtype
        if effective == "float16" and self.scales_experts:
            raise InputError(
                f"--dtype {dtype}: in float16 vLLM rescales the hidden states of {self.path} "
                "(routed_scaling_factor), so they would be wrong; use --dtype bfloat16"
            )

    def dtype_of_states(self, dtype: str) -> str:
        """The dtype that vLLM computes in.

        Args:
            dtype: as asked for; ``"auto"`` for the checkpoint's own, but for float32, which vLLM
                runs in 16 bits unless it is told otherwise.
        """
        if dtype != "auto":
            return dtype
        own = self.dtype or "bfloat16"
        return "bfloat16" if own == "float32" else own

    def check_max_model_len(self, max_model_len: int) -> None:
        """Refuse a length beyond the checkpoint's positions; scaled ones are left to vLLM."""
        positions = self.max_position_embeddings
        if positions is not None and not self.rope_scaled and max_model_len > positions:
            raise InputError(
                f"--max-model-len {max_model_len}: {self.path} has {positions} positions; "
                f"use at most {positions}"
            )


def read_verifier(path: Path, *, needs_weights: bool = True) -> Verifier:
    """Read the facts of the checkpoint in ``path``.

    Args:
        path: the checkpoint's folder.
        needs_weights: whether its weights must be there, too.

    Raises:
        InputError: ``path`` is no checkpoint that can be read.
    """
    if not path.is_dir():
        raise InputError(
            f"--model {path}: no such folder; give the folder of a downloaded checkpoint"
        )
    config = read_config(path)
    if needs_weights and not any(entry.name.endswith(WEIGHT_SUFFIXES) for entry in path.iterdir()):
        raise InputError(
            f"--model {path}: holds a config.json but no weights ({', '.join(WEIGHT_SUFFIXES)}); "
            "finish the download"
        )
    return _verifier_from(path, config)


def read_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` of the checkpoint in ``path``.

    Raises:
        InputError: there is none that can be read.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"--model {file.parent}: no checkpoint, it has no config.json") from None
    except (OSError, ValueError) as error:
        raise InputError(f"--model: {file} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise InputError(f"--model: {file} holds {type(config).__name__}, expected a JSON object")
    return config


def _verifier_from(path: Path, config: dict[str, Any]) -> Verifier:
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise InputError(f"--model: text_config in {path / 'config.json'} is no JSON object")
    positions = text.get("max_position_embeddings")
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    dtype = text.get("dtype") or text.get("torch_dtype")
    dtype = dtype or config.get("dtype") or config.get("torch_dtype")
    return Verifier(
        path=path,
        num_hidden_layers=_positive_integer(path, text, "num_hidden_layers"),
        hidden_size=_positive_integer(path, text, "hidden_size"),
        vocab_size=_positive_integer(path, text, "vocab_size"),
        max_position_embeddings=positions if isinstance(positions, int) else None,
        rope_scaled=isinstance(rope, dict) and "factor" in rope,
        dtype=dtype if isinstance(dtype, str) else None,
        scales_experts=text.get("routed_scaling_factor", 1.0) not in (None, 1, 1.0),
    )


def _positive_integer(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            f"--model: {path / 'config.json'} says {key} = {value!r}; expected a positive integer "
            "there or in text_config"
        )
    return value
