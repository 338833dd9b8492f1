"""Hidden states and logits by transformers in float32: what an extraction is compared with.

Each sequence runs alone, without padding and without a cache, with the plain ("eager") attention.
Nothing here uses vLLM or speculators. For a wrapper such as Kimi-K2.5 the language model is taken
out of the checkpoint; its code is transformers' own, so no remote code runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

# What a right extraction in float32 stays below; about 2e-5 is usual.
TOLERANCE = 1e-4

DEEPSEEK_MODEL_TYPES = ("deepseek_v3", "kimi_k2")
LANGUAGE_MODEL_PREFIX = "language_model."


def reference_hidden_states(
    model_dir: Path, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]
) -> list[list[Tensor]]:
    """The hidden states after given layers.

    Args:
        model_dir: a checkpoint folder: any decoder that transformers itself knows, or a Kimi-K2.5
            (its language model is used).
        sequences: token ids of each sequence.
        layer_ids: layers, counted from 0, in the order wanted; the state of layer i is the output
            of decoder layer i, for the last one too (before the final norm).

    Returns:
        For each sequence, for each layer id: a float32 tensor [tokens, hidden size].

    Raises:
        InputError: the folder is no such checkpoint, a layer or token id is out of range, or a
            sequence is empty.
    """
    return ReferenceModel.load(model_dir).hidden_states(sequences, layer_ids)


def reference_logits(model_dir: Path, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits after every token.

    Args:
        model_dir: as for `reference_hidden_states`.
        sequences: token ids of each sequence.

    Returns:
        For each sequence: a float32 tensor [tokens, vocabulary size].

    Raises:
        InputError: as for `reference_hidden_states`.
    """
    return ReferenceModel.load(model_dir).logits(sequences)


@dataclass(frozen=True)
class ReferenceModel:
    """A loaded reference, for those who ask more than once.

    Args:
        model: a transformers causal language model, in float32.
        layers: its decoder layers, in order.
    """

    model: Any
    layers: Sequence[nn.Module]

    @classmethod
    def load(cls, model_dir: Path) -> ReferenceModel:
        """Loads a checkpoint in float32.

        Raises:
            InputError: as for `reference_hidden_states`.
        """
        config = _read_config(model_dir)
        if "text_config" in config:
            model = _load_language_model(model_dir, config["text_config"])
        else:
            model = _load_plain(model_dir)
        # Gemma 3's base_model is the whole model in transformers 4.
        decoders: tuple[Any, ...] = (model.base_model, getattr(model, "model", None))
        layers = next((each.layers for each in decoders if hasattr(each, "layers")), None)
        if layers is None:
            raise InputError(
                f"{model_dir}: expected a decoder with `layers`, found "
                f"{type(model).__name__}. No reference can be made for this model."
            )
        return cls(model.eval(), layers)

    def hidden_states(
        self, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]
    ) -> list[list[Tensor]]:
        """See `reference_hidden_states`."""
        for layer_id in layer_ids:
            if not 0 <= layer_id < len(self.layers):
                raise InputError(
                    f"layer id {layer_id}: expected 0 to {len(self.layers) - 1}, the model has "
                    f"{len(self.layers)} layers. Choose other layers."
                )
        return [self._states_of(sequence, layer_ids) for sequence in sequences]

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """See `reference_logits`."""
        return [self._forward(sequence).logits[0] for sequence in sequences]

    def _states_of(self, sequence: Sequence[int], layer_ids: Sequence[int]) -> list[Tensor]:
        found: dict[int, Tensor] = {}

        def keep(layer_id: int, output: Any) -> None:
            # Depending on the model and the release, a layer returns its state alone or first.
            state = output[0] if isinstance(output, tuple) else output
            found[layer_id] = state.detach()[0].clone()

        hooks = [
            self.layers[layer_id].register_forward_hook(
                lambda module, inputs, output, layer_id=layer_id: keep(layer_id, output)
            )
            for layer_id in set(layer_ids)
        ]
        try:
            self._forward(sequence)
        finally:
            for hook in hooks:
                hook.remove()
        return [found[layer_id] for layer_id in layer_ids]

    def _forward(self, sequence: Sequence[int]) -> Any:
        import torch

        vocabulary_size = self.model.config.vocab_size
        if not sequence:
            raise InputError("sequence: expected at least one token, found none. Leave it out.")
        for token_id in sequence:
            if not 0 <= token_id < vocabulary_size:
                raise InputError(
                    f"token id {token_id}: expected 0 to {vocabulary_size - 1}. "
                    "The sequence was made with another tokenizer."
                )
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([list(sequence)]), use_cache=False)


def _read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: expected a checkpoint's configuration, found: {error}. "
            "Give the folder of a checkpoint."
        ) from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(config).__name__}.")
    quantized = config.get("quantization_config") or config.get("text_config", {}).get(
        "quantization_config"
    )
    if quantized:
        raise InputError(
            f"{path}: expected plain weights, found quantization_config. "
            "A float32 reference needs the weights unquantized."
        )
    return config


def _load_language_model(model_dir: Path, text_config: dict[str, Any]) -> Any:
    """The language model of a wrapper, whose tensors carry the prefix ``language_model.``."""
    model_type = text_config.get("model_type")
    if model_type not in DEEPSEEK_MODEL_TYPES:
        raise InputError(
            f"{model_dir / 'config.json'}: expected a text_config of a DeepSeek-V3 "
            f"({' or '.join(DEEPSEEK_MODEL_TYPES)}), found {model_type!r}. "
            "No reference can be made for this wrapper."
        )
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    plain = {key: value for key, value in text_config.items() if key != "model_type"}
    weights = _read_language_model_weights(model_dir)
    return _load(
        DeepseekV3ForCausalLM, model_dir, None, config=DeepseekV3Config(**plain), state_dict=weights
    )


def _read_language_model_weights(model_dir: Path) -> dict[str, Tensor]:
    """The tensors under the prefix, without it (transformers 4.57 cannot rename them in shards)."""
    from safetensors import SafetensorError, safe_open

    weights: dict[str, Tensor] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    if name.startswith(LANGUAGE_MODEL_PREFIX):
                        weights[name.removeprefix(LANGUAGE_MODEL_PREFIX)] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{path}: expected a safetensors file, found: {error}. The checkpoint is damaged."
            ) from error
    return weights


def _load_plain(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, model_dir, model_dir)


def _load(kind: Any, model_dir: Path, source: Path | None, **options: Any) -> Any:
    """Loads weights in float32, and refuses a model of which a part would stay random."""
    import torch

    try:
        model, loading = kind.from_pretrained(
            source,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{model_dir}: expected a checkpoint that transformers loads without remote code, "
            f"found: {error}"
        ) from error
    wrong = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
    if wrong:
        raise InputError(
            f"{model_dir}: expected every weight of {type(model).__name__}, found {len(wrong)} "
            f"missing or of another shape, first {wrong[0]}. The checkpoint is incomplete."
        )
    return model


def relative_error(found: Tensor, expected: Tensor) -> float:
    """How far hidden states are from the reference.

    The largest over the rows (tokens) of ``||found - expected|| / ||expected||``, with Euclidean
    norms in float64. Another shape, or a value that is not finite, is infinitely far.

    Args:
        found: [tokens, hidden size], any floating dtype.
        expected: the reference, of the same shape.
    """
    if found.shape != expected.shape:
        return math.inf
    wanted = expected.detach().cpu().double()
    distance = (found.detach().cpu().double() - wanted).norm(dim=-1)
    # A row of zeros is met by zeros alone.
    errors = distance / wanted.norm(dim=-1)
    errors[distance == 0] = 0.0
    largest = errors.max().item() if len(errors) else 0.0
    return largest if math.isfinite(largest) else math.inf


@dataclass(frozen=True)
class Comparison:
    """Relative errors of every layer of every sample.

    Args:
        layer_ids: the layers, in the order compared.
        token_counts: the tokens of each sample.
        errors: ``errors[sample][position of the layer]``, as `relative_error` defines it.
    """

    layer_ids: tuple[int, ...]
    token_counts: tuple[int, ...]
    errors: tuple[tuple[float, ...], ...]

    @property
    def worst(self) -> float:
        """The largest error of all; infinite when nothing was compared."""
        return max((error for sample in self.errors for error in sample), default=math.inf)

    def agrees(self, tolerance: float = TOLERANCE) -> bool:
        """Whether every error is at most the tolerance."""
        return self.worst <= tolerance


def compare(
    found: Sequence[Sequence[Tensor]],
    expected: Sequence[Sequence[Tensor]],
    layer_ids: Sequence[int],
) -> Comparison:
    """Compares extracted hidden states with the reference.

    Args:
        found: for each sample, for each layer: [tokens, hidden size].
        expected: the same from `reference_hidden_states`.
        layer_ids: the layers of both, in their order.

    Raises:
        InputError: the numbers of samples or of layers differ.
    """
    for what, counts in (
        ("samples", (len(found), len(expected))),
        *(("layers", (len(f), len(layer_ids))) for f in found),
        *(("layers", (len(e), len(layer_ids))) for e in expected),
    ):
        if counts[0] != counts[1]:
            raise InputError(
                f"comparison: expected as many {what} on both sides, found {counts[0]} and "
                f"{counts[1]}. The extraction is incomplete."
            )
    return Comparison(
        layer_ids=tuple(layer_ids),
        token_counts=tuple(len(sample[0]) if sample else 0 for sample in expected),
        errors=tuple(
            tuple(relative_error(f, e) for f, e in zip(sample, reference, strict=True))
            for sample, reference in zip(found, expected, strict=True)
        ),
    )
