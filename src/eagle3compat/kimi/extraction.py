"""From a data set to sample files, through the real generator of speculators 0.3 or 0.4.

`prepare` refuses whatever can be refused without an engine; `carry_out` starts one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

import eagle3compat
from eagle3compat.errors import InputError, Refusal
from eagle3compat.installed import Build, find_build
from eagle3compat.kimi.dataset import Sample, read_samples
from eagle3compat.kimi.storage import claim_output_folder, sample_path, write_sample
from eagle3compat.kimi.verifier import Verifier, read_verifier

if TYPE_CHECKING:
    import torch

    from eagle3compat.plan import Plan

GENERATOR_FILE = Path("data_generation", "vllm_hidden_states_generator.py")
GENERATE = "speculators.data_generation.vllm_hidden_states_generator.VllmHiddenStatesGenerator"


@dataclass(frozen=True)
class Settings:
    """What the user asks for.

    Attributes:
        model: folder of the verifier's checkpoint.
        data: the ``.jsonl`` data set.
        out: folder for the sample files.
        layers: auxiliary layer ids and, last, that of the target; None for speculators' default.
        max_model_len: tokens of the longest sequence, and one more.
        tensor_parallel_size: GPUs that share the verifier.
        max_num_batched_tokens: token budget of one engine step; None for the generator's own.
        dtype: of the verifier's weights and states; ``"auto"`` for the checkpoint's own.
        batch_size: sequences in one call of the generator.
    """

    model: Path
    data: Path
    out: Path
    layers: tuple[int, ...] | None = None
    max_model_len: int = 2048
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int | None = None
    dtype: str = "auto"
    batch_size: int = 8


@dataclass(frozen=True)
class Job:
    """A request that passed every check that needs no engine; its plan is applied."""

    settings: Settings
    plan: Plan
    verifier: Verifier
    layers: tuple[int, ...]
    samples: list[Sample]

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.input_ids) for sample in self.samples)


@dataclass(frozen=True)
class Summary:
    """What was done.

    Attributes:
        job: the request.
        written_bytes: size of all sample files.
        seconds: wall clock of engine start, extraction and writing.
    """

    job: Job
    written_bytes: int
    seconds: float


def prepare(settings: Settings) -> Job:
    """Check everything that can be checked before an engine starts, and apply the plan.

    Cheap checks come first. The output folder is made last: a refusal leaves nothing behind.

    Raises:
        InputError: what is wrong, where, and what to do.
        Refusal: no plan makes these builds of vLLM and speculators work together.
    """
    find_build("vllm")
    check_in_process_route(find_build("speculators"))
    verifier = read_verifier(settings.model)
    layers = verifier.check_layers(settings.layers)
    verifier.check_dtype(settings.dtype)
    verifier.check_max_model_len(settings.max_model_len)
    samples = read_samples(settings.data, verifier, settings.max_model_len)
    plan = eagle3compat.apply()
    claim_output_folder(settings.out)
    return Job(settings, plan, verifier, layers, samples)


def check_in_process_route(speculators: Build) -> None:
    """Refuse a speculators without an in-process generator (0.5 and later), naming its route."""
    if (speculators.package_dir / GENERATOR_FILE).is_file():
        return
    raise InputError(
        f"speculators {speculators.version} in {speculators.package_dir} has no in-process "
        "generator (speculators 0.3 and 0.4 have); its route is vLLM's native "
        "extract_hidden_states, which needs no shims: use speculators' own scripts, or install "
        "speculators==0.3.0"
    )


def carry_out(job: Job, advance: Callable[[Sample], None]) -> Summary:
    """Extract and write every sample.

    Args:
        job: from `prepare`.
        advance: called after each sample that is on the disk.

    Returns:
        The figures of the run.

    Raises:
        InputError: vLLM does not accept the settings.
        Refusal: the workers are not patched as planned, or the states cannot be right.
    """
    start = time.monotonic()
    generator = open_generator(job)
    written_bytes = 0
    try:
        for first in range(0, len(job.samples), job.settings.batch_size):
            batch = job.samples[first : first + job.settings.batch_size]
            results = generator.generate([sample.input_ids for sample in batch])
            check_results(batch, results, len(job.layers), job.verifier.hidden_size)
            for index, (sample, result) in enumerate(zip(batch, results, strict=True), first):
                path = sample_path(job.settings.out, index)
                states = result["hidden_states"]
                written_bytes += write_sample(path, sample.input_ids, sample.loss_mask, states)
                advance(sample)
    finally:
        generator.executor.shutdown()
    return Summary(job, written_bytes, time.monotonic() - start)


def open_generator(job: Job) -> Any:
    """Start the engine: speculators' generator, with the dtype and budget that it does not take.

    The generator's constructor has no parameters for them, so they are put in where it builds its
    config. The rest of that config stays as the installed speculators writes it.
    """
    from speculators.data_generation import vllm_hidden_states_generator as module

    class ConfiguredGenerator(module.VllmHiddenStatesGenerator):  # type: ignore[misc]
        def _create_vllm_config(self, *arguments: Any, **options: Any) -> Any:
            with config_values(module, _overrides(job.settings)):
                try:
                    return super()._create_vllm_config(*arguments, **options)
                except ValueError as error:
                    raise InputError(
                        f"vLLM does not accept these settings: {_reasons(error)}"
                    ) from error

    return ConfiguredGenerator(
        model_path=str(job.verifier.path),
        layer_ids=list(job.layers),
        max_model_len=job.settings.max_model_len,
        tensor_parallel_size=job.settings.tensor_parallel_size,
    )


def _overrides(settings: Settings) -> dict[str, dict[str, Any]]:
    overrides: dict[str, dict[str, Any]] = {"ModelConfig": {"dtype": settings.dtype}}
    if settings.max_num_batched_tokens is not None:
        overrides["SchedulerConfig"] = {"max_num_batched_tokens": settings.max_num_batched_tokens}
    return overrides


def _reasons(error: ValueError) -> str:
    """What a config of vLLM objects to, without pydantic's dump of the input."""
    if isinstance(error, ValidationError):
        return "; ".join(detail["msg"] for detail in error.errors())
    return str(error)


@contextmanager
def config_values(module: ModuleType, overrides: dict[str, dict[str, Any]]) -> Iterator[None]:
    """While it lasts, the module's config classes take these values over those at the call site.

    It wraps what stands under the name, which is the shims' adapted class when one is applied.
    """
    originals = {name: getattr(module, name) for name in overrides}

    def overridden(name: str) -> Callable[..., Any]:
        return lambda *arguments, **options: originals[name](
            *arguments, **{**options, **overrides[name]}
        )

    for name in overrides:
        setattr(module, name, overridden(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def check_results(
    batch: Sequence[Sample],
    results: Sequence[dict[str, Any]],
    layer_count: int,
    hidden_size: int,
) -> None:
    """Refuse results that cannot be the states of the batch, before any of them is written.

    Args:
        batch: the samples asked for.
        results: the generator's answer: one dictionary a sample.
        layer_count: how many layers were asked for.
        hidden_size: of the verifier.

    Raises:
        Refusal: another number or order of samples, another shape, or states that are not finite
            or all zero.
    """
    if len(results) != len(batch):
        raise _refusal(f"{len(batch)} results", f"{len(results)}")
    for sample, result in zip(batch, results, strict=True):
        place = f"the sample of line {sample.line}"
        if result["input_ids"].tolist() != sample.input_ids:
            raise _refusal(f"the token ids of {place}", "those of another sequence")
        if len(result["hidden_states"]) != layer_count:
            raise _refusal(f"{layer_count} layers for {place}", f"{len(result['hidden_states'])}")
        for states in result["hidden_states"]:
            _check_states(place, states, (len(sample.input_ids), hidden_size))


def _check_states(place: str, states: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(states.shape) != shape:
        raise _refusal(f"states {list(shape)} for {place}", f"{list(states.shape)}")
    if not bool(states.isfinite().all()):
        raise _refusal(f"finite states for {place}", "NaN or infinity")
    # One row may be zero: a padding token's embedding is, and in the first place it stays so.
    if not bool(states.any()):
        raise _refusal(f"states for {place}", "zeros alone")


def _refusal(expected: str, found: str) -> Refusal:
    return Refusal(
        f"{GENERATE}.generate",
        expected,
        found,
        "Nothing of this batch was written; run verify-patches and report it.",
    )
