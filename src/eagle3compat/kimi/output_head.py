"""From a stored last state to the next token, by the checkpoint's final norm and ``lm_head``.

Nothing but these two weights is read, and ``lm_head`` a block at a time: the real Kimi-K2.5's has
163,840 rows of 7,168. All products are in float32.

**What rounding explains.** An engine in bfloat16 rounds what stands between the stored state and
its logits; the product here does not. Its greedy token need then not have the largest logit here,
but one that is at most so far below it:

- Each element of the normalized state is rounded up to three times (the residual stream's sum, the
  normalized value, its product with the norm's weight), each time by at most the unit roundoff u of
  the dtype (2^-8 for bfloat16), as often up as down. By Hoeffding's inequality their effect on the
  difference of two logits is at most ``SAFETY * u * sqrt(3) * ||(w_a - w_b) * n||``, but for one
  case in 10^7 (``2 exp(-SAFETY^2 / 2)``); w_a and w_b are the tokens' rows, n the normalized state.
- Both logits are rounded once more: ``u * (|l_a| + |l_b|)``.
- Sums of H products are taken in float32, in another order: at most ``SAFETY * 2^-24 * sqrt(H) *
  (|w_a| + |w_b|) |n|`` (N. Higham and T. Mary, A new approach to probabilistic rounding error
  analysis, SIAM J. Sci. Comput. 41, 2019, theorem 3.1).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.manifest import Proof
from eagle3compat.kimi.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

# Where checkpoints keep the language model: alone, in Kimi-K2.5's wrapper, in transformers 5's.
_MODEL_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
_HEAD_PREFIXES = ("", "language_model.", "model.language_model.")
# Their final norm is no plain RMS norm: the weight is one too small.
_SHIFTED_NORMS = ("gemma",)

SAFETY = 6.0
_STATE_ROUNDINGS = 3
_FLOAT32_ROUNDOFF = 2.0**-24
# Elements of lm_head at a time: small enough for a processor's cache.
_BLOCK_ELEMENTS = 1 << 20
_PARTS_A_THREAD = 4


@dataclass(frozen=True)
class OutputHead:
    """The final norm and the output matrix of a checkpoint.

    Args:
        norm_weight: float32 [hidden size].
        epsilon: of the RMS norm.
        matrix_file: safetensors file of the output matrix.
        matrix_name: its tensor, ``lm_head.weight`` or, where both are tied, the embedding.
        vocab_size: its rows that are tokens.
    """

    norm_weight: torch.Tensor
    epsilon: float
    matrix_file: Path
    matrix_name: str
    vocab_size: int

    @property
    def hidden_size(self) -> int:
        """Width of a state."""
        return len(self.norm_weight)

    def normalize(self, states: torch.Tensor) -> torch.Tensor:
        """The final RMS norm in float32: [n, hidden size] of any dtype in, float32 out."""
        import torch

        values = states.float()
        mean_square = values.square().mean(dim=-1, keepdim=True)
        return values * torch.rsqrt(mean_square + self.epsilon) * self.norm_weight

    def judge(self, states: torch.Tensor, next_tokens: Sequence[int]) -> list[Proof]:
        """Compare the engine's greedy tokens with what last states yield.

        Args:
            states: the last layer's states of n positions, [n, hidden size], before the final
                norm, in the dtype of the engine.
            next_tokens: the n tokens that the engine sampled greedily.

        Returns:
            A proof for each, which holds where rounding explains the difference (see the module).

        Raises:
            InputError: a token outside the vocabulary, or a checkpoint that can no longer be read.
        """
        import torch

        normalized = self.normalize(states)
        tokens = torch.tensor(next_tokens, dtype=torch.long)
        tops, top_logits = self._largest(normalized, states.dtype)
        top_rows = self.rows(tops, states.dtype)
        rows = self.rows(tokens, states.dtype)
        logits = (rows * normalized).sum(dim=-1)
        allowed = _allowed(normalized, (top_rows, top_logits), (rows, logits), states.dtype)
        return [
            Proof(token, int(top), 0.0 if token == int(top) else float(largest - logit), float(may))
            for token, top, largest, logit, may in zip(
                next_tokens, tops, top_logits, logits, allowed, strict=True
            )
        ]

    def rows(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the output matrix as the engine holds them, in float32: [n, hidden size].

        Args:
            tokens: n token ids.
            dtype: that the engine keeps its weights in.
        """
        import torch

        outside = [int(token) for token in tokens if not 0 <= int(token) < self.vocab_size]
        if outside:
            raise InputError(
                f"token id {outside[0]}: outside the vocabulary of {self.matrix_file.parent} "
                f"(0 to {self.vocab_size - 1}). It is another checkpoint's."
            )
        with _opened(self.matrix_file) as file:
            matrix = file.get_slice(self.matrix_name)
            rows = [matrix[int(token) : int(token) + 1] for token in tokens]
        return torch.cat(rows).to(dtype).float()

    def _largest(
        self, normalized: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The token with the largest logit and that logit, for each of n normalized states."""
        import torch

        tops = torch.zeros(len(normalized), dtype=torch.long)
        largest = torch.full((len(normalized),), -math.inf)
        threads = os.cpu_count() or 1
        part = -(-self.vocab_size // (_PARTS_A_THREAD * threads))
        parts = [
            range(start, min(start + part, self.vocab_size))
            for start in range(0, self.vocab_size, part)
        ]
        work = partial(self._largest_of, normalized, dtype)
        for values, tokens in in_threads(work, parts, threads):
            tops = torch.where(values > largest, tokens, tops)
            largest = torch.maximum(largest, values)
        return tops, largest

    def _largest_of(
        self, normalized: torch.Tensor, dtype: torch.dtype, tokens: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of some of the tokens, and which it is, for each normalized state."""
        import torch

        tops = torch.zeros(len(normalized), dtype=torch.long)
        largest = torch.full((len(normalized),), -math.inf)
        step = max(1, _BLOCK_ELEMENTS // self.hidden_size)
        with _opened(self.matrix_file) as file:
            matrix = file.get_slice(self.matrix_name)
            for start in tokens[::step]:
                block = matrix[start : min(start + step, tokens.stop)].to(dtype).float()
                values, places = (normalized @ block.T).max(dim=-1)
                tops = torch.where(values > largest, places + start, tops)
                largest = torch.maximum(largest, values)
        return largest, tops


def _allowed(
    normalized: torch.Tensor,
    top: tuple[torch.Tensor, torch.Tensor],
    token: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The shortfall that rounding explains, for each of n states; see the module."""
    import torch

    roundoff = torch.finfo(dtype).eps / 2
    difference = ((top[0] - token[0]) * normalized).norm(dim=-1)
    states = SAFETY * roundoff * math.sqrt(_STATE_ROUNDINGS) * difference
    logits = roundoff * (top[1].abs() + token[1].abs())
    sizes = ((top[0].abs() + token[0].abs()) * normalized.abs()).sum(dim=-1)
    sums = SAFETY * _FLOAT32_ROUNDOFF * math.sqrt(normalized.shape[-1]) * sizes
    return states + logits + sums


def open_output_head(model: Path) -> OutputHead:
    """Find the final norm and the output matrix of a checkpoint in safetensors.

    Args:
        model: the checkpoint's folder; a wrapper's ``text_config`` and prefixes are understood,
            tied embeddings and a sharded index too.

    Raises:
        InputError: the checkpoint keeps them otherwise, quantized for instance; it says how.
    """
    config = _text_config(model)
    files = _tensor_files(model)
    norm = _find(model, files, [f"{prefix}norm.weight" for prefix in _MODEL_PREFIXES])
    matrix = _find(model, files, _matrix_names(config, files))
    with _opened(files[norm]) as file:
        weight = file.get_tensor(norm).float()
    with _opened(files[matrix]) as file:
        rows, width = file.get_slice(matrix).get_shape()
    if width != len(weight):
        raise InputError(f"{model}: {matrix} is {width} wide, its final norm {len(weight)}.")
    epsilon = config.get("rms_norm_eps")
    if not isinstance(epsilon, float) or str(config.get("model_type")).startswith(_SHIFTED_NORMS):
        raise InputError(
            f"{model}: has no plain final RMS norm (model_type {config.get('model_type')!r}, "
            f"rms_norm_eps {epsilon!r}); expected one."
        )
    vocab_size = min(rows, int(config.get("vocab_size", rows)))
    return OutputHead(weight, epsilon, files[matrix], matrix, vocab_size)


def _matrix_names(config: dict[str, Any], files: dict[str, Path]) -> list[str]:
    heads = [f"{prefix}lm_head.weight" for prefix in _HEAD_PREFIXES]
    embeddings = [f"{prefix}embed_tokens.weight" for prefix in _MODEL_PREFIXES]
    tied = config.get("tie_word_embeddings")
    if tied is None:  # transformers leaves its default out, and models' defaults differ
        tied = not any(head in files for head in heads)
    return embeddings if tied else heads


def _text_config(model: Path) -> dict[str, Any]:
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no configuration of a checkpoint ({error}).") from error
    text = config.get("text_config", config) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise InputError(f"{path}: expected a JSON object, and one in text_config.")
    outer = {"tie_word_embeddings": config.get("tie_word_embeddings")}
    return {**outer, **text}


def _tensor_files(model: Path) -> dict[str, Path]:
    """The file of each tensor: by the index where there is one, else from the files' headers."""
    index = model / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: model / file for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index}: no index of safetensors files ({error!r}).") from error
    found: dict[str, Path] = {}
    for path in sorted(model.glob("*.safetensors")):
        with _opened(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def _find(model: Path, files: dict[str, Path], names: list[str]) -> str:
    for name in names:
        if name in files:
            return name
    raise InputError(
        f"{model}: no safetensors file holds {' or '.join(names)}; without plain weights of that "
        "name (they may be quantized, or in another format) next tokens cannot be checked."
    )


def _opened(path: Path) -> Any:
    """A safetensors file, mapped into memory.

    Raises:
        InputError: it is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: no safetensors file that can be read ({error}).") from error
