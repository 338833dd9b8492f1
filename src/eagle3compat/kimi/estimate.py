"""What an extraction will take, from a checkpoint's ``config.json`` and a data set alone.

Nothing is guessed: what cannot be known from these (activations, an architecture that is not known
here) is left out and said to be. Every figure of memory is what is needed *at least*.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.dataset import ACCOUNT_FILE, SampleFile
from eagle3compat.kimi.extraction import SLABS, settle_step_tokens
from eagle3compat.kimi.manifest import read_manifests
from eagle3compat.kimi.parameters import ITEM_BYTES, Weights, count_weights
from eagle3compat.kimi.storage import sample_bytes
from eagle3compat.kimi.verifier import Verifier, read_config, read_verifier
from eagle3compat.verifier_parts import text_part

GIB = 1 << 30

CACHE_SHARE = 0.8 * 0.2
"""Of a GPU's memory that the weights leave free, what speculators gives to the KV cache: its
``gpu_memory_utilization`` times its ``CACHE_MEMORY_FRACTION`` (0.3 and 0.4)."""
STEPS_ON_THE_DEVICE = 2
"""Steps whose captured states are on a GPU at once: one is computed while one is copied."""
MANIFEST_LINE = 1024
"""Bytes that a sample takes in the manifest, at most, but for those of its layers."""
MANIFEST_LAYER = 80


@dataclass(frozen=True)
class EstimateSettings:
    """What is to be estimated.

    Attributes:
        model: folder of the verifier's checkpoint; its weights are not needed.
        data: a prepared folder or a ``.jsonl`` file; None where only its size is known.
        tokens: of the data set, where there is none yet.
        samples: likewise.
        out: folder for the hidden states.
        layers: layer ids; None for speculators' default.
        max_model_len: longest sample, and the one token that the engine samples.
        tensor_parallel_size: GPUs that share the verifier.
        max_num_batched_tokens: token budget of a step; None for speculators' own.
        dtype: of weights and states; ``"auto"`` for the checkpoint's own.
        gpu_memory: bytes that a GPU has; None to ask ``nvidia-smi``.
        tokens_per_second: rate of extraction, or None.
    """

    model: Path
    data: Path | None = None
    tokens: int | None = None
    samples: int | None = None
    out: Path = Path()
    layers: tuple[int, ...] | None = None
    max_model_len: int = 2048
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int | None = None
    dtype: str = "auto"
    gpu_memory: int | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class DataSize:
    """Size of a data set.

    Attributes:
        samples: how many; None where it is not known.
        tokens: of all samples.
        longest: tokens of the longest sample; None where it is not known.
    """

    samples: int | None
    tokens: int
    longest: int | None


@dataclass(frozen=True)
class Estimate:
    """What an extraction will take; None where it is not known. Sizes are in bytes.

    Attributes:
        layers: auxiliary layer ids and, last, the target's.
        dtype: of the hidden states.
        samples: of the data set.
        tokens: of the data set.
        bytes_a_token: of hidden states, all layers.
        bytes_to_write: of all sample files and the manifest, at most.
        bytes_there: of samples that an earlier run of this extraction has done.
        disk_free: where the files are to go.
        parameters: of the checkpoint, vision tower included.
        quantisation: of the checkpoint's linear layers, in words.
        weights: of the checkpoint.
        weights_unquantised: of the checkpoint in its dtype.
        weights_a_gpu: of one GPU's part.
        gpus: that share the verifier.
        cache_a_token: of the KV cache on one GPU.
        states_on_gpu: captured states of the steps that are on a GPU at once.
        gpu_memory: that a GPU has.
        gpu_needed: that a GPU needs at least: weights, captured states and a KV cache for one
            sequence of the longest length; activations and libraries come on top.
        cache_tokens: that the KV cache will hold in what the weights leave free.
        gpu_left: of a GPU's memory for activations and libraries.
        host_pinned: of the host's memory, for rows on their way to the disk.
        host_available: memory that the host has available.
        seconds: at the rate that was given.
        bytes_a_second: that the disk must take at that rate.
        problems: what will not fit or cannot work, each with what to do.
        notes: what is not known or left out.
    """

    layers: tuple[int, ...]
    dtype: str
    samples: int | None
    tokens: int | None
    bytes_a_token: int
    bytes_to_write: int | None
    bytes_there: int
    disk_free: int
    parameters: int | None
    quantisation: str | None
    weights: int | None
    weights_unquantised: int | None
    weights_a_gpu: int | None
    gpus: int
    cache_a_token: int | None
    states_on_gpu: int
    gpu_memory: int | None
    gpu_needed: int | None
    cache_tokens: int | None
    gpu_left: int | None
    host_pinned: int
    host_available: int | None
    seconds: float | None
    bytes_a_second: float | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing is known that would stop the extraction."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"fits": self.fits, **{each.name: getattr(self, each.name) for each in fields(self)}}


def estimate(settings: EstimateSettings) -> Estimate:
    """Estimate an extraction; neither torch nor an engine is loaded.

    Raises:
        InputError: the checkpoint, the data set or an option cannot be used.
    """
    verifier = read_verifier(settings.model, needs_weights=False)
    layers = verifier.check_layers(settings.layers)
    verifier.check_dtype(settings.dtype)
    verifier.check_max_model_len(settings.max_model_len)
    return _Estimator(settings, verifier, layers).estimate()


class _Estimator:
    """One estimate: what it was asked, and what it finds to say."""

    def __init__(
        self, settings: EstimateSettings, verifier: Verifier, layers: tuple[int, ...]
    ) -> None:
        self._settings = settings
        self._verifier = verifier
        self._layers = layers
        self._config = read_config(settings.model)
        self._text = text_part(self._config)
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._dtype = verifier.dtype_of_states(settings.dtype)
        self._item = ITEM_BYTES.get(self._dtype, 2)

    def estimate(self) -> Estimate:
        data = self._data()
        gpus = self._settings.tensor_parallel_size
        weights = count_weights(self._config)
        self._check_division(weights)
        stored = self._stored_bytes(weights)
        a_gpu = weights.bytes(self._item, gpus=gpus) if weights else None
        to_write, there, free = self._disk(data)
        on_gpu = STEPS_ON_THE_DEVICE * self._step_bytes
        memory, needed, cache_tokens, left = self._gpu(a_gpu, on_gpu, weights)
        rate = self._settings.tokens_per_second
        estimate = Estimate(
            layers=self._layers,
            dtype=self._dtype,
            samples=data.samples if data else None,
            tokens=data.tokens if data else None,
            bytes_a_token=self._bytes_a_token,
            bytes_to_write=to_write,
            bytes_there=there,
            disk_free=free,
            parameters=weights.parameters if weights else None,
            quantisation=weights.quantisation.title if weights and weights.quantisation else None,
            weights=stored,
            weights_unquantised=self._plain_bytes(weights),
            weights_a_gpu=a_gpu,
            gpus=gpus,
            cache_a_token=self._cache_a_token(weights),
            states_on_gpu=on_gpu,
            gpu_memory=memory,
            gpu_needed=needed,
            cache_tokens=cache_tokens,
            gpu_left=left,
            host_pinned=self._pinned(),
            host_available=_available_memory(),
            seconds=data.tokens / rate if data and rate else None,
            bytes_a_second=rate * self._bytes_a_token if rate else None,
            problems=(),
            notes=(),
        )
        self._check_host(estimate)
        said = {"problems": tuple(self._problems), "notes": tuple(self._notes)}
        return Estimate(**{**vars(estimate), **said})

    @property
    def _bytes_a_token(self) -> int:
        return len(self._layers) * self._verifier.hidden_size * self._item

    @property
    def _tokens_a_step(self) -> int:
        settings = self._settings
        return settle_step_tokens(settings.max_num_batched_tokens, settings.max_model_len)

    @property
    def _step_bytes(self) -> int:
        return self._tokens_a_step * self._bytes_a_token

    def _data(self) -> DataSize | None:
        settings = self._settings
        if settings.data is None:
            if settings.tokens is None:
                self._notes.append("no data set was given: --data, or --tokens and --samples")
                return None
            if settings.samples is None:
                self._notes.append("the number of samples is not known: files' heads are left out")
            return DataSize(settings.samples, settings.tokens, None)
        size = data_size(settings.data, self._verifier, settings.max_model_len)
        if size.longest is not None and size.longest >= settings.max_model_len:
            raise InputError(
                f"--data {settings.data}: its longest sample has {size.longest} tokens, and one "
                f"more is sampled; raise --max-model-len to {size.longest + 1} or prepare it anew"
            )
        return size

    def _disk(self, data: DataSize | None) -> tuple[int | None, int, int]:
        """Bytes to write, bytes that are there, and bytes free."""
        out = self._settings.out
        free = shutil.disk_usage(_nearest(out)).free
        there = _bytes_done(out)
        if data is None:
            return None, there, free
        layers, hidden = len(self._layers), self._verifier.hidden_size
        rows = sample_bytes(data.tokens, layers, hidden, self._item)
        a_file = sample_bytes(0, layers, hidden, self._item) + MANIFEST_LINE
        samples = data.samples or 0
        needed = rows + max(0, samples - 1) * a_file + samples * MANIFEST_LAYER * layers
        if needed - there > free:
            self._problems.append(
                f"disk: {_size(needed - there)} are needed in {out}, {_size(free)} are free; give "
                "another --out, fewer --layers, or split the data set over machines (--shard)"
            )
        return needed, there, free

    def _check_division(self, weights: Weights | None) -> None:
        """What vLLM splits must come out even."""
        gpus = self._settings.tensor_parallel_size
        for key, what in (
            ("num_attention_heads", "attention heads"),
            ("intermediate_size", "columns of the dense layers"),
            ("moe_intermediate_size", "columns of an expert"),
        ):
            count = self._text.get(key)
            if isinstance(count, int) and count % gpus:
                self._problems.append(
                    f"tensor parallel size {gpus}: {count} {what} cannot be split evenly; use a "
                    f"divisor of {count}"
                )
        heads = weights.key_value_heads if weights else None
        if heads and heads % gpus and gpus % heads:
            self._problems.append(
                f"tensor parallel size {gpus}: {heads} key-value heads can neither be split evenly "
                "nor repeated evenly"
            )
        self._check_blocks(weights)
        experts = self._text.get("n_routed_experts")
        if isinstance(experts, int) and experts % gpus:
            self._notes.append(
                f"{experts} experts cannot be laid evenly on {gpus} GPUs, each whole"
            )

    def _check_blocks(self, weights: Weights | None) -> None:
        """Elements that share a scale must stay together."""
        gpus, width = self._settings.tensor_parallel_size, self._text.get("moe_intermediate_size")
        if weights is None or weights.quantisation is None or not isinstance(width, int):
            return
        block = weights.quantisation.block[1]
        if width % gpus == 0 and (width // gpus) % block:
            self._problems.append(
                f"tensor parallel size {gpus}: an expert's part has {width // gpus} columns, no "
                f"multiple of the {block} that share a scale; use a smaller one"
            )

    def _stored_bytes(self, weights: Weights | None) -> int | None:
        if weights is not None:
            return weights.bytes(ITEM_BYTES.get(self._verifier.dtype or "", 2))
        stored = _indexed_bytes(self._settings.model)
        kind = self._text.get("model_type")
        self._notes.append(
            f"the architecture {kind!r}, or its quantisation, is not known here, so its parameters "
            "are not counted, nor what a GPU needs"
            + (
                "; the size of the weights is that of their files"
                if stored is not None
                else ", and there are no weights or index of them to tell the size from"
            )
        )
        return stored

    def _plain_bytes(self, weights: Weights | None) -> int | None:
        return weights.bytes(self._item, quantised=False) if weights else None

    def _cache_a_token(self, weights: Weights | None) -> int | None:
        """Of one GPU. A latent cache is whole on each; heads are split, at least one on each."""
        if weights is None:
            return None
        layers = self._verifier.num_hidden_layers
        if weights.key_value_heads is None:
            width = self._text["kv_lora_rank"] + self._text["qk_rope_head_dim"]
            return int(layers * width * self._item)
        heads = max(1, weights.key_value_heads // self._settings.tensor_parallel_size)
        head = self._text.get("head_dim") or (
            self._verifier.hidden_size // self._text["num_attention_heads"]
        )
        return int(layers * 2 * heads * head * self._item)

    def _gpu(
        self, a_gpu: int | None, on_gpu: int, weights: Weights | None
    ) -> tuple[int | None, int | None, int | None, int | None]:
        """Memory that a GPU has and needs at least, tokens of its KV cache, and what is left."""
        settings = self._settings
        memory = settings.gpu_memory
        if memory is None:
            found = _nvidia_memory()
            memory = min(found, default=None)
            if found and len(found) < settings.tensor_parallel_size:
                self._problems.append(
                    f"tensor parallel size {settings.tensor_parallel_size}: nvidia-smi lists "
                    f"{len(found)} GPUs"
                )
        cache = self._cache_a_token(weights)
        if a_gpu is None or cache is None:
            return memory, None, None, None
        states, keys = on_gpu / (1 - CACHE_SHARE), settings.max_model_len * cache / CACHE_SHARE
        needed = a_gpu + int(max(states, keys))
        self._notes.append("activations, CUDA and its libraries take memory of a GPU on top")
        if memory is None:
            self._notes.append("the memory of a GPU is not known here: --gpu-memory")
            return None, needed, None, None
        free = max(0, memory - a_gpu)
        if needed > memory:
            self._problems.append(
                f"GPU: {_size(needed)} are needed on each of {settings.tensor_parallel_size} at "
                f"least, {_size(memory)} are there; use more GPUs (--tensor-parallel-size), a "
                "smaller --max-num-batched-tokens, or a smaller --max-model-len"
            )
        left = memory - a_gpu - on_gpu - int(free * CACHE_SHARE)
        return memory, needed, int(free * CACHE_SHARE) // cache, left

    def _pinned(self) -> int:
        # Beside each row there are its sum (int64) and its norm (float32), a layer each.
        beside = self._tokens_a_step * len(self._layers) * (8 + 4)
        return SLABS * (self._step_bytes + beside)

    def _check_host(self, estimate: Estimate) -> None:
        available = estimate.host_available
        if available is not None and estimate.host_pinned > available:
            self._problems.append(
                f"host memory: {_size(estimate.host_pinned)} are needed for rows on their way to "
                f"the disk, {_size(available)} are available; use a smaller "
                "--max-num-batched-tokens"
            )


def data_size(data: Path, verifier: Verifier, max_model_len: int) -> DataSize:
    """Size of a data set: from its account, if it was prepared, else by reading all of it.

    Raises:
        InputError: it cannot be read, or a row is not one that `extract` takes.
    """
    account = data / ACCOUNT_FILE
    if account.is_file():
        try:
            figures = json.loads(account.read_text(encoding="utf-8"))
            return DataSize(figures["samples"], figures["tokens"], figures["longest"])
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"--data {account}: cannot be read ({error!r})") from error
    samples = SampleFile(data, verifier, max_model_len)
    return DataSize(len(samples), samples.tokens, max(samples.token_counts))


def _bytes_done(out: Path) -> int:
    if not out.is_dir():
        return 0
    return sum(
        record.bytes for manifest in read_manifests(out) for record in manifest.done.values()
    )


def _indexed_bytes(model: Path) -> int | None:
    """Size of the weights by their index, or by their files; None where there is neither."""
    index = model / "model.safetensors.index.json"
    try:
        return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    except FileNotFoundError:
        sizes = [path.stat().st_size for path in model.glob("*.safetensors")]
        return sum(sizes) or None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--model: {index} cannot be read ({error!r})") from error


def _nvidia_memory() -> list[int]:
    """Bytes of memory of each GPU that ``nvidia-smi`` lists; none where it does not work."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return [int(line) << 20 for line in listed.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _available_memory() -> int | None:
    """Bytes that Linux can hand out without swapping; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest of its parents that is there."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def _size(count: float) -> str:
    for unit, title in ((GIB, "GiB"), (1 << 20, "MiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {title}"
    return f"{count / 1024:,.1f} KiB"


def estimate_rows(found: Estimate) -> Iterator[tuple[str, str]]:
    """An estimate for the user: what, and how much; one row a figure that is known."""
    yield "layers", f"{', '.join(map(str, found.layers))} (outputs; the last is the target)"
    yield "bytes a token", f"{found.bytes_a_token:,} ({found.dtype})"
    if found.tokens is not None:
        samples = "" if found.samples is None else f" in {found.samples:,} samples"
        yield "data set", f"{found.tokens:,} tokens{samples}"
    if found.bytes_to_write is not None:
        there = f", of which {_size(found.bytes_there)} are there" if found.bytes_there else ""
        yield "disk needed", f"{_size(found.bytes_to_write)} at most{there}"
    yield "disk free", _size(found.disk_free)
    yield "parameters", "unknown" if found.parameters is None else f"{found.parameters:,}"
    yield "weights", _weights_text(found)
    yield from _gpu_rows(found)
    yield (
        "host buffers",
        f"{_size(found.host_pinned)} pinned, {_memory(found.host_available)} available",
    )
    if found.bytes_a_second is not None:
        yield "disk must take", f"{found.bytes_a_second / 1e9:,.2f} GB/s"
    if found.seconds is not None:
        yield "time", _duration(found.seconds)


def _weights_text(found: Estimate) -> str:
    if found.weights is None:
        return "unknown"
    text = _size(found.weights)
    if found.quantisation is not None and found.weights_unquantised is not None:
        text += f" ({found.quantisation}; {_size(found.weights_unquantised)} without)"
    return text


def _gpu_rows(found: Estimate) -> Iterator[tuple[str, str]]:
    yield "GPUs", f"{found.gpus} (tensor parallel), {_memory(found.gpu_memory)} each"
    if found.weights_a_gpu is None or found.cache_a_token is None or found.gpu_needed is None:
        yield "needed on a GPU", "unknown"
        return
    yield "weights on a GPU", _size(found.weights_a_gpu)
    yield "states on a GPU", f"{_size(found.states_on_gpu)} ({STEPS_ON_THE_DEVICE} steps)"
    held = "" if found.cache_tokens is None else f", {found.cache_tokens:,} tokens will fit"
    yield "KV cache", f"{found.cache_a_token:,} bytes a token on a GPU{held}"
    yield "needed on a GPU", f"{_size(found.gpu_needed)} at least"
    if found.gpu_left is not None and found.gpu_left >= 0:
        yield "left on a GPU", f"{_size(found.gpu_left)} for activations and libraries"


def _memory(count: int | None) -> str:
    return "unknown" if count is None else _size(count)


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 2 else f"{minutes:.1f} minutes"
