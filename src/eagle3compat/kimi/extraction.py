"""From a data set to sample files, through the engine of speculators 0.3's or 0.4's generator.

`prepare` refuses whatever can be refused without an engine; `carry_out` starts one. The states
leave the worker that computes them for files alone: `streaming` drives, `state_writer` writes,
`account` gives proved samples their place. A rerun goes on where the last one stopped.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, BinaryIO

from pydantic import ValidationError

import eagle3compat
from eagle3compat.errors import InputError, Refusal
from eagle3compat.installed import Build, find_build
from eagle3compat.kimi.account import Account
from eagle3compat.kimi.dataset import Sample, SampleFile
from eagle3compat.kimi.exchange import StreamSettings
from eagle3compat.kimi.manifest import (
    EPSILON,
    EndRecord,
    Manifest,
    ManifestWriter,
    RunRecord,
    SampleRecord,
    input_digest,
    read_manifest,
)
from eagle3compat.kimi.parameters import ITEM_BYTES
from eagle3compat.kimi.storage import WHOLE, ExtractionFolder, Shard, sample_bytes
from eagle3compat.kimi.streaming import Stream, in_groups
from eagle3compat.kimi.verifier import WEIGHT_SUFFIXES, Verifier, read_verifier
from eagle3compat.plan import Plan

GENERATOR_FILE = Path("data_generation", "vllm_hidden_states_generator.py")
EXTENSION = "eagle3compat.kimi.streaming_worker.StreamingWorkerExtension"
# Speculators' own budget of a step (its MIN_MAX_BATCHED_TOKENS) and its MAX_NUM_SEQS.
TOKENS_A_STEP = 8192
SEQUENCES_A_STEP = 32
# Buffers of one step's rows: one is filled while writers empty the others.
SLABS = 4
# Samples that are looked at to see whether a data set is in the order that it was in.
ORDER_CHECKS = 256


@dataclass(frozen=True)
class Settings:
    """What the user asks for.

    Attributes:
        model: folder of the verifier's checkpoint.
        data: the ``.jsonl`` data set.
        out: folder for the sample files and the manifest.
        layers: auxiliary layer ids and, last, that of the target; None for speculators' default.
        max_model_len: tokens of the longest sequence, and one more.
        tensor_parallel_size: GPUs that share the verifier.
        max_num_batched_tokens: token budget of one engine step; None for speculators' own.
        max_num_seqs: sequences in one engine step.
        dtype: of the verifier's weights and states; ``"auto"`` for the checkpoint's own.
        shard: the part of the data set to extract.
        writers: threads that write.
    """

    model: Path
    data: Path
    out: Path
    layers: tuple[int, ...] | None = None
    max_model_len: int = 2048
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = SEQUENCES_A_STEP
    dtype: str = "auto"
    shard: Shard = WHOLE
    writers: int = min(8, os.cpu_count() or 1)

    @property
    def tokens_a_step(self) -> int:
        """The token budget of one engine step, asked for or speculators' own."""
        return settle_step_tokens(self.max_num_batched_tokens, self.max_model_len)


@dataclass(frozen=True)
class Job:
    """A request that passed every check that needs no engine; its plan is applied.

    Attributes:
        settings: the request.
        plan: applied.
        verifier: of the settings.
        layers: layer ids, settled.
        dtype: of the states.
        samples: of the whole data set.
        folder: where they go.
        todo: numbers of the samples that are to be extracted.
        record: of this run, for the manifest.
        lock: keeps other runs off the folder.
    """

    settings: Settings
    plan: Plan
    verifier: Verifier
    layers: tuple[int, ...]
    dtype: str
    samples: SampleFile
    folder: ExtractionFolder
    todo: frozenset[int]
    record: RunRecord
    lock: BinaryIO

    @property
    def tokens(self) -> int:
        """Tokens of the samples that are to be extracted."""
        return sum(self.samples.token_counts[index] for index in self.todo)

    @property
    def groups(self) -> Iterator[list[int]]:
        """Samples that share steps of the engine, of those groups in which some are to do."""
        groups = in_groups(
            self.settings.shard.indices(len(self.samples)),
            self.samples.token_counts,
            self.settings.tokens_a_step,
            self.settings.max_num_seqs,
        )
        return (group for group in groups if not self.todo.isdisjoint(group))


@dataclass(frozen=True)
class Summary:
    """What was done.

    Attributes:
        job: the request.
        done: samples that this run extracted and proved.
        tokens: of them.
        written_bytes: size of their files.
        set_aside: samples of this run whose proof failed.
        unproved: why next tokens were not proved; None where they were.
        engine_seconds: until the engine was up.
        generating_seconds: from its first step until its last.
        seconds: from its first step until the last byte was safe.
    """

    job: Job
    done: int = 0
    tokens: int = 0
    written_bytes: int = 0
    set_aside: list[SampleRecord] = field(default_factory=list)
    unproved: str | None = None
    engine_seconds: float = 0.0
    generating_seconds: float = 0.0
    seconds: float = 0.0


def settle_step_tokens(asked: int | None, max_model_len: int) -> int:
    """The token budget of one engine step: as asked for, or speculators' own."""
    return asked or max(TOKENS_A_STEP, max_model_len)


def prepare(settings: Settings) -> Job:
    """Check everything that can be checked before an engine starts, and apply the plan.

    Cheap checks come first. The output folder is made last: a refusal leaves nothing behind.

    Raises:
        InputError: what is wrong, where, and what to do.
        Refusal: no plan makes these builds of vLLM and speculators work together.
    """
    vllm, speculators = find_build("vllm"), find_build("speculators")
    check_in_process_route(speculators)
    verifier = read_verifier(settings.model)
    layers = verifier.check_layers(settings.layers)
    verifier.check_dtype(settings.dtype)
    verifier.check_max_model_len(settings.max_model_len)
    dtype = _dtype(settings, verifier)
    folder = ExtractionFolder(settings.out, settings.shard)
    folder.check()
    samples = SampleFile(settings.data, verifier, settings.max_model_len)
    manifest = read_manifest(folder.manifest, (settings.shard.number, settings.shard.count))
    todo = frozenset(settings.shard.indices(len(samples))) - manifest.done.keys()
    folder.check_space(
        sum(
            sample_bytes(
                samples.token_counts[index],
                len(layers),
                verifier.hidden_size,
                ITEM_BYTES[dtype],
            )
            for index in todo
        )
    )
    plan = eagle3compat.apply()
    record = RunRecord(
        run=len(manifest.runs),
        started=round(time.time(), 3),
        builds=_builds(vllm, speculators),
        shims=tuple(decision.shim.id for decision in plan.needed),
        model=str(settings.model.resolve()),
        model_digest=model_digest(settings.model),
        layers=layers,
        hidden_size=verifier.hidden_size,
        dtype=dtype,
        data=str(settings.data.resolve()),
        samples=len(samples),
        data_digest=samples.digest,
        shard=(settings.shard.number, settings.shard.count),
        settings={
            "max_model_len": settings.max_model_len,
            "max_num_batched_tokens": settings.tokens_a_step,
            "max_num_seqs": settings.max_num_seqs,
            "tensor_parallel_size": settings.tensor_parallel_size,
        },
    )
    check_continues(manifest, record, samples)
    lock = folder.claim()
    return Job(settings, plan, verifier, layers, dtype, samples, folder, todo, record, lock)


def _dtype(settings: Settings, verifier: Verifier) -> str:
    dtype = verifier.dtype_of_states(settings.dtype)
    if dtype not in EPSILON:
        raise InputError(
            f"--dtype {settings.dtype}: {settings.model} is in {dtype}; name one of "
            f"{', '.join(EPSILON)}"
        )
    return dtype


def _builds(vllm: Build, speculators: Build) -> dict[str, str]:
    return {
        "eagle3compat": eagle3compat.__version__,
        "vllm": vllm.title,
        "speculators": speculators.title,
        "torch": version("torch"),
    }


def model_digest(model: Path) -> str:
    """A digest of a checkpoint's config.json and of its weight files' names and sizes."""
    digest = hashlib.blake2b((model / "config.json").read_bytes(), digest_size=16)
    for entry in sorted(model.iterdir()):
        if entry.name.endswith(WEIGHT_SUFFIXES):
            digest.update(f"{entry.name} {entry.stat().st_size}\n".encode())
    return digest.hexdigest()


def check_continues(manifest: Manifest, record: RunRecord, samples: Sequence[Sample]) -> None:
    """Refuse to go on with an extraction of something else.

    Args:
        manifest: of the folder, before this run.
        record: of this run.
        samples: of the data set.

    Raises:
        InputError: naming what is not as it was.
    """
    if not manifest.runs:
        return
    last = manifest.runs[-1]
    for name in ("model_digest", "layers", "dtype", "samples", "data_digest", "settings"):
        was, now = getattr(last, name), getattr(record, name)
        if was != now:
            raise InputError(
                f"{manifest.path}: the extraction in this folder has {name} {was}, this run has "
                f"{now}; go on with the same, or give a new folder"
            )
    # The digest of the data set does not depend on its order.
    done_samples = list(manifest.done.items())
    for index, done in done_samples[:: len(done_samples) // ORDER_CHECKS + 1]:
        sample = samples[index]
        if input_digest(sample.input_ids, sample.loss_mask) != done.input_digest:
            raise InputError(
                f"{record.data}:{sample.line}: is another sample than the one that "
                f"{manifest.path} has as number {index}; go on with the same data set, or give a "
                "new folder"
            )


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


def carry_out(job: Job, advance: Callable[[SampleRecord], None]) -> Summary:
    """Extract, write and prove every sample that is to do.

    Args:
        job: from `prepare`.
        advance: called after each sample that is accounted for, from another thread.

    Returns:
        The figures of the run. A sample that was set aside does not raise.

    Raises:
        InputError: vLLM does not accept the settings.
        Refusal: the workers are not patched as planned, or the states cannot be right.
        InterruptedRun: a worker died, or files cannot be written.
        OSError: the manifest cannot be written.
    """
    if not job.todo:
        return Summary(job)
    start = time.monotonic()
    generator = open_generator(job)
    try:
        up = time.monotonic()
        return replace(extract(job, generator, advance), engine_seconds=up - start)
    finally:
        generator.executor.shutdown()


def extract(job: Job, generator: Any, advance: Callable[[SampleRecord], None]) -> Summary:
    """As `carry_out`, through the engine that `open_generator` started for a job like this."""
    manifest = ManifestWriter(job.folder.manifest)
    account = Account(job.folder, manifest, job.record.run, advance)
    try:
        stream = open_stream(job, generator, account)
        manifest.append([job.record])
        start = time.monotonic()
        stream.extract(job.groups, job.samples, job.todo)
        generating_seconds = time.monotonic() - start
        stream.drain()
        account.finish()
        seconds = time.monotonic() - start
        stream.close()
        manifest.append([EndRecord(job.record.run, round(seconds, 3), account.tokens)])
    finally:
        account.stop()
        manifest.close()
    return Summary(
        job,
        done=account.done,
        tokens=account.tokens,
        written_bytes=account.bytes,
        set_aside=account.set_aside,
        unproved=stream.unprovable,
        generating_seconds=generating_seconds,
        seconds=seconds,
    )


def open_stream(job: Job, generator: Any, account: Account) -> Stream:
    """Have the engine's workers ready to write.

    Raises:
        Refusal: the engine computes in another dtype, or an earlier one still writes.
    """
    from speculators.data_generation import vllm_hidden_states_generator as module

    settings = StreamSettings(
        unfinished=str(job.folder.unfinished.resolve()),
        lock=str(job.folder.writer_lock.resolve()),
        threads=job.settings.writers,
        cores=_cores(),
        slabs=SLABS,
        tokens_a_step=job.settings.tokens_a_step,
        hidden_size=job.verifier.hidden_size,
        last_layer=_position(job.verifier.num_hidden_layers - 1, job.layers),
    )
    stream = Stream(generator, module, settings, account)
    if stream.dtype != job.dtype:
        raise Refusal(
            f"--dtype {job.settings.dtype}",
            f"states in {job.dtype}",
            f"an engine that computes in {stream.dtype}",
            f"Say --dtype {stream.dtype}.",
        )
    return stream


def _cores() -> tuple[int, ...]:
    """The cores that this process may use; none where the system binds no threads."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def _position(layer: int, layers: tuple[int, ...]) -> int | None:
    return layers.index(layer) if layer in layers else None


def open_generator(job: Job, more: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Any:
    """Start the engine: speculators' generator, with the dtype and budget that it does not take.

    Args:
        job: from `prepare`.
        more: values for vLLM's config classes, by class name, beyond those of the job.

    The generator's constructor has no parameters for them, so they are put in where it builds its
    config. The rest of that config stays as the installed speculators writes it.
    """
    from speculators.data_generation import vllm_hidden_states_generator as module
    from vllm.platforms import current_platform

    overrides = {name: dict(values) for name, values in _overrides(job.settings).items()}
    # The stream takes results whenever they come, which generate() does not.
    overrides["SchedulerConfig"]["async_scheduling"] = current_platform.is_cuda()
    for name, values in more.items():
        overrides.setdefault(name, {}).update(values)

    class ConfiguredGenerator(module.VllmHiddenStatesGenerator):  # type: ignore[misc]
        def _create_vllm_config(self, *arguments: Any, **options: Any) -> Any:
            with config_values(module, overrides):
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
    return {
        "ModelConfig": {"dtype": settings.dtype},
        "ParallelConfig": {"worker_extension_cls": EXTENSION},
        "SchedulerConfig": {
            "max_num_batched_tokens": settings.tokens_a_step,
            "max_num_seqs": settings.max_num_seqs,
        },
    }


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
