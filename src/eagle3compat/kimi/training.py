"""Training a draft with speculators' own trainer, from sample files to a folder that vLLM serves.

The installed speculators (0.3 or 0.4) does the work: its draft model, data set, sampler, collation
and trainer, with our shims applied. This module settles what they are given, keeps the run so that
it can be taken up after a kill, and writes what speculators leaves out of the draft's config.

A draft's folder holds::

    config.json, model.safetensors     the draft, once all epochs are done
    training.json                      the settings and the data that it was started with
    metrics.jsonl                      loss and accuracy, appended as they come
    training.svg                       the same, drawn
    vocabulary/                        d2t and t2d
    checkpoints/{epoch}/               the latest epoch's end, as speculators saves it, in float32
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import InputError, Refusal
from eagle3compat.kimi.draft import draft_layer_sizes
from eagle3compat.kimi.metrics import (
    LOGGER,
    UNTRAINED,
    Figures,
    History,
    Recorder,
    Report,
    can_plot,
    plot,
    read_history,
)
from eagle3compat.kimi.storage import write_whole
from eagle3compat.kimi.training_data import (
    SampleFolder,
    TrainingData,
    find_samples,
    read_samples,
)
from eagle3compat.kimi.verifier import Verifier, read_verifier
from eagle3compat.kimi.vocabulary import (
    Vocabulary,
    load_arrays,
    make_vocabulary,
    settle_size,
)
from eagle3compat.verifier_parts import served_layer_ids

if TYPE_CHECKING:
    from eagle3compat.plan import Plan

MASK_BLOCK = 128
"""Tokens in a block of flex attention's mask, which the sequence length has to be a multiple of."""
ATTENTION = "simple_flex_attention"
"""The name by which speculators registers its attention, masks and all, with transformers."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"
SETTINGS, METRICS, PLOT, LOCK = "training.json", "metrics.jsonl", "training.svg", "training.lock"
CHECKPOINTS, VOCABULARY, UNFINISHED = "checkpoints", "vocabulary", "unfinished"
DTYPES = ("bfloat16", "float32")
_FREE_TO_CHANGE = frozenset({"out", "device", "loader_workers"})
"""Settings with which a run may be taken up differently."""


@dataclass(frozen=True)
class Settings:
    """What to train, and how.

    Args:
        model: folder of the verifier's checkpoint.
        hidden_states: folder of an extraction, or one with sample files itself.
        out: the draft's folder; a run that was interrupted there is taken up.
        layers: layer ids in the order of the files' tensors, each the output of that layer, the
            target's last; needed where neither a manifest nor speculators' data_config.json tells.
        draft_vocab_size: tokens of the draft; None for 32,000, or all of a smaller verifier's.
        epochs: how often every training sample is seen.
        learning_rate: the highest; it rises over the first hundredth of the steps and falls to 0.
        sequence_length: tokens of one step, packed from several samples; a multiple of 128. Longer
            samples are cut to it, and counted.
        ttt_steps: tokens that the draft predicts in a row while training, and is saved to.
        ttt_step_loss_decay: weight of each next token's loss beside the one before.
        num_draft_layers: decoder layers of the draft.
        norm_before_residual: whether the draft's residual starts behind the norm.
        noise: half the width of the uniform noise that is added to the auxiliary states.
        validation_share: share of the samples that are held back, at least one; 0 for none.
        seed: of the draft's first weights, the split, the batches and the noise.
        dtype: of the saved draft's weights; training is in float32.
        device: None for a GPU where there is one, else the CPU.
        loader_workers: processes that read samples; 0 reads them between steps.
    """

    model: Path
    hidden_states: Path
    out: Path
    layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    epochs: int = 10
    learning_rate: float = 1e-4
    sequence_length: int = 2048
    ttt_steps: int = 3
    ttt_step_loss_decay: float = 1.0
    num_draft_layers: int = 1
    norm_before_residual: bool = True
    noise: float = 0.05
    validation_share: float = 0.1
    seed: int = 0
    dtype: str = "bfloat16"
    device: str | None = None
    loader_workers: int = 0


@dataclass(frozen=True)
class Summary:
    """What was trained.

    Args:
        draft: the draft's folder, which vLLM takes as ``speculative_config["model"]``.
        plan: the shims of training.
        layers: extraction's layer ids, each the output of that layer, the target's last.
        served_layers: the auxiliary layers of the saved config, as vLLM counts them.
        vocabulary: the draft's.
        training_samples: samples that were trained on.
        validation_samples: samples that were held back.
        missing_samples: samples of the data set that are not there, by the manifest.
        cut_samples: samples longer than the sequence length, cut to it.
        steps: training steps.
        runs: starts that it took.
        first: the first step's figures.
        last: the last step's.
        untrained: the validation before the first step; None without one.
        validation: the last one; None without one.
        seconds: of all runs.
        plot: the drawing, or None without matplotlib.
    """

    draft: Path
    plan: Plan
    layers: tuple[int, ...]
    served_layers: tuple[int, ...]
    vocabulary: Vocabulary
    training_samples: int
    validation_samples: int
    missing_samples: int
    cut_samples: int
    steps: int
    runs: int
    first: Figures
    last: Figures
    untrained: Figures | None
    validation: Figures | None
    seconds: float
    plot: Path | None


def train_draft(settings: Settings, report: Report | None = None) -> Summary:
    """Train a draft, or go on where an earlier call on the same folder was interrupted.

    Called again on a finished draft, it returns the same figures and trains nothing.

    Args:
        settings: what to train, and how.
        report: called with each line of ``metrics.jsonl`` after it is written.

    Returns:
        What was trained.

    Raises:
        InputError: something of the settings, the data or the draft's folder cannot be used; before
            a model is loaded.
        Refusal: the installed speculators is not one that the shims know.
    """
    verifier, size = _check_settings(settings)
    samples = find_samples(settings.hidden_states, verifier, settings.layers)
    with _locked(settings.out), shims_applied() as plan:
        data = read_samples(samples, verifier)
        training, held_back = split(len(data.lengths), settings.validation_share, settings.seed)
        _claim(settings, data, samples)
        vocabulary = make_vocabulary(
            settings.out / VOCABULARY, data.counts, data.digest, size, verifier.vocab_size
        )
        history = read_history(settings.out / METRICS)
        if not (history.ended and (settings.out / CONFIG).is_file()):
            _train(settings, data, vocabulary, (training, held_back), report)
            history = read_history(settings.out / METRICS)
        drawing = settings.out / PLOT
        if can_plot():
            plot(history, drawing)
        return _summary(settings, plan, data, vocabulary, (training, held_back), history)


@contextmanager
def shims_applied() -> Iterator[Plan]:
    """The shims of training in this process: those that are applied already, or until the end.

    Raises:
        InputError: this speculators has no trainer of the kind.
        Refusal: it is unknown, or other shims are applied.
    """
    import eagle3compat
    from eagle3compat import applying

    plan = eagle3compat.installed_plan("training")
    if plan.route == "native":
        raise InputError(
            f"speculators {plan.consumer.version} in {plan.consumer.package_dir}: its training is "
            "not driven from here; use its own scripts, or install speculators==0.3.0"
        )
    plan.check()
    wanted = {decision.shim.id for decision in plan.needed}
    current = applying.current()
    if current is None:
        eagle3compat.apply(training_only=True)
        try:
            yield plan
        finally:
            eagle3compat.restore()
    elif plan.stage.value in current.stages and wanted <= set(current.shims):
        yield plan
    else:
        raise Refusal(
            "eagle3compat.apply()",
            f"the shims {', '.join(sorted(wanted))} in this process",
            f"a plan with {', '.join(current.shims) or 'no shims'}",
            "Call restore() first, or train in a process of its own.",
        )


def split(count: int, share: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which samples are trained on, and which are held back for validation.

    speculators' own split depends on the order in which the file system lists a folder.

    Args:
        count: of all samples.
        share: that is held back: at least one sample if it is above 0.
        seed: of the choice.

    Returns:
        Numbers of samples, rising, of both kinds.

    Raises:
        InputError: nothing is left to train on.
    """
    held = max(1, round(share * count)) if share > 0 else 0
    if held >= count:
        raise InputError(
            f"--validation-share {share}: of {count} samples none is left to train on; extract "
            "more, or give 0"
        )
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(sorted(order[held:])), tuple(sorted(order[:held]))


# --- before anything expensive -------------------------------------------------------------------


def _check_settings(settings: Settings) -> tuple[Verifier, int]:
    positive = ("epochs", "learning_rate", "sequence_length", "ttt_steps", "num_draft_layers")
    for name in positive:
        if not getattr(settings, name) > 0:
            option = name.replace("_", "-")
            raise InputError(f"--{option} {getattr(settings, name)}: expected more than 0")
    if settings.sequence_length % MASK_BLOCK:
        raise InputError(
            f"--sequence-length {settings.sequence_length}: expected a multiple of {MASK_BLOCK}, "
            "the block of the attention mask"
        )
    if not 0 <= settings.validation_share < 1:
        raise InputError(
            f"--validation-share {settings.validation_share}: expected 0 to less than 1"
        )
    if settings.noise < 0 or settings.ttt_step_loss_decay <= 0 or settings.loader_workers < 0:
        raise InputError("noise and loader workers are at least 0, the loss decay is more than 0")
    if settings.dtype not in DTYPES:
        raise InputError(f"--dtype {settings.dtype}: expected {' or '.join(DTYPES)}")
    verifier = read_verifier(settings.model)
    return verifier, settle_size(settings.draft_vocab_size, verifier)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the draft's folder; two trainings in one would spoil each other's checkpoints."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        stream = (out / LOCK).open("w")
    except OSError as error:
        raise InputError(f"--out {out}: cannot be used ({error})") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"--out {out}: another training is running in it") from error
        yield


def _claim(settings: Settings, data: TrainingData, samples: SampleFolder) -> None:
    """Note what the folder's training was started with, or see that it is the same.

    Raises:
        InputError: the folder holds another training, or something else.
    """
    from importlib.metadata import version

    values = {
        field.name: _plain(getattr(settings, field.name))
        for field in fields(settings)
        if field.name not in _FREE_TO_CHANGE
    }
    values |= {
        "layers": list(samples.layers),
        "data_digest": data.digest,
        "speculators": version("speculators"),
    }
    path = settings.out / SETTINGS
    if path.exists():
        try:
            started: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read ({error})") from error
        names = [name for name in values if started.get(name) != values[name]]
        if names:
            listed = ", ".join(
                f"{name} {started.get(name)!r}, now {values[name]!r}" for name in names
            )
            raise InputError(
                f"--out {settings.out}: holds a training with other settings ({listed}); give them "
                "again, or another folder"
            )
        return
    strange = sorted(entry.name for entry in settings.out.iterdir() if entry.name != LOCK)
    if strange:
        raise InputError(
            f"--out {settings.out}: is in use (holds {strange[0]}); give a new or empty folder"
        )
    write_whole(path, lambda stream: _put(stream, json.dumps(values, indent=1) + "\n"))


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.resolve())
    return list(value) if isinstance(value, tuple) else value


def _put(stream: Any, text: str) -> None:
    stream.write(text.encode("utf-8"))


# --- training ------------------------------------------------------------------------------------


def _train(
    settings: Settings,
    data: TrainingData,
    vocabulary: Vocabulary,
    parts: tuple[Sequence[int], Sequence[int]],
    report: Report | None,
) -> None:
    import torch

    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shutil.rmtree(settings.out / UNFINISHED, ignore_errors=True)
    with _recorded(settings, report) as recorder:
        torch.manual_seed(settings.seed)
        model = _make_draft(settings, data.folder.layers, vocabulary)
        training, validation = (
            _loader(settings, data, part, device, with_noise=part is parts[0]) for part in parts
        )
        trainer = _make_trainer(settings, model, training, validation, device, recorder)
        trainer.run_training()
        _export(settings, model)
        recorder.append({"kind": "end"})


@contextmanager
def _recorded(settings: Settings, report: Report | None) -> Iterator[Recorder]:
    """speculators' figures go to ``metrics.jsonl``, and its chatter nowhere."""
    import logging

    import loguru

    from eagle3compat import __version__

    recorder = Recorder(settings.out / METRICS, report)
    logger = logging.getLogger(LOGGER)
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(recorder)
    loguru.logger.disable("speculators")
    try:
        recorder.append({"kind": "run", "eagle3compat": __version__})
        yield recorder
    finally:
        loguru.logger.enable("speculators")
        logger.removeHandler(recorder)
        logger.level, logger.propagate = before
        recorder.close()


def _make_draft(settings: Settings, layers: tuple[int, ...], vocabulary: Vocabulary) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers.models.llama.configuration_llama import LlamaConfig

    checkpoint = json.loads((settings.model / CONFIG).read_text(encoding="utf-8"))
    verifier = VerifierConfig(
        name_or_path=str(settings.model.resolve()),
        architectures=checkpoint.get("architectures") or [],
    )
    layer = LlamaConfig(**draft_layer_sizes(settings.model, settings.num_draft_layers))
    layer._attn_implementation = ATTENTION
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=vocabulary.size,
        norm_before_residual=settings.norm_before_residual,
        eagle_aux_hidden_state_layer_ids=served_layer_ids(layers[:-1]),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=settings.ttt_steps)],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )
    d2t, t2d = load_arrays(settings.out / VOCABULARY, vocabulary)
    return Eagle3DraftModel(config=config, t2d=t2d, d2t=d2t)


def _loader(
    settings: Settings,
    data: TrainingData,
    part: Sequence[int],
    device: Any,
    *,
    with_noise: bool,
) -> Any:
    """The samples of a part, packed into sequences; None for an empty part."""
    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.noise_transforms import AddUniformNoise
    from torch.utils.data import DataLoader

    if not part:
        return None
    noise = AddUniformNoise(std=settings.noise) if with_noise and settings.noise else None
    dataset = Eagle3SampleFileDataset(
        max_len=settings.sequence_length,
        file_list=[str(data.folder.files[index]) for index in part],
        transform=noise,
        standardize_fn=_in_served_order(data.folder.layers),
    )
    with warnings.catch_warnings():
        # Samples that are cut are counted in the summary.
        warnings.filterwarnings("ignore", message="Found .* samples longer")
        sampler = MultipackDistributedBatchSamplerV2(
            batch_max_length=settings.sequence_length,
            # Shifting takes the first token of each. What the data set has itself is a guess by
            # file sizes, by which a batch may hold more than fits, and loses it.
            lengths=[max(data.lengths[index] - 1, 1) for index in part],
            num_replicas=1,
            rank=0,
            seed=settings.seed,
        )
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=create_collate_fn(settings.sequence_length),
        num_workers=settings.loader_workers,
        pin_memory=device.type == "cuda",
    )


def _in_served_order(layers: tuple[int, ...]) -> Any:
    """What turns a sample file into the trainer's tensors, with the layers as vLLM feeds them."""
    auxiliary = layers[:-1]
    order = sorted(range(len(auxiliary)), key=auxiliary.__getitem__)

    def standardize(sample: dict[str, Any]) -> dict[str, Any]:
        import torch

        states = sample["hidden_states"]
        return {
            "hidden_states": torch.cat([states[position] for position in order], dim=-1),
            "input_ids": sample["input_ids"],
            "verifier_last_hidden_states": states[-1],
            "loss_mask": sample["loss_mask"],
        }

    return standardize


def _make_trainer(
    settings: Settings, model: Any, training: Any, validation: Any, device: Any, recorder: Recorder
) -> Any:
    """speculators' trainer, which saves whole checkpoints that a run goes on from exactly."""
    import torch
    from speculators.train.trainer import Trainer, TrainerConfig

    steps = [_steps_of(training, epoch) for epoch in range(settings.epochs)]
    calls = {
        "use_off_policy_tokens": False,
        "ttt_steps": settings.ttt_steps,
        "ttt_step_loss_decay": settings.ttt_step_loss_decay,
    }
    config = TrainerConfig(
        lr=settings.learning_rate,
        num_epochs=settings.epochs,
        save_path=str(settings.out / CHECKPOINTS),
        resume_from_checkpoint=True,
        is_distributed=False,
        local_rank=device,
        train_call_kwargs=calls,
        val_call_kwargs=calls,
        scheduler_type="linear",
        scheduler_warmup_steps=max(1, sum(steps) // 100),
        scheduler_total_steps=sum(steps),
    )

    class ResumableTrainer(Trainer):  # type: ignore[misc]
        def run_training(self) -> None:
            if self.current_epoch == 0 and self.val_loader is not None:
                recorder.validating = UNTRAINED
                self.val_epoch(0)
            super().run_training()

        def train_epoch(self, epoch: int) -> None:
            # Whatever came before, an epoch draws the same noise and counts on from the same step.
            torch.manual_seed(settings.seed + 1 + epoch)
            self.global_step = sum(steps[:epoch])
            recorder.validating = epoch
            super().train_epoch(epoch)

        def val_epoch(self, epoch: int) -> None:
            if self.val_loader is not None:
                super().val_epoch(epoch)

        def save_checkpoint(self, epoch: int) -> None:
            checkpoints = self.checkpointer.path
            self.checkpointer.path = settings.out / UNFINISHED
            try:
                # bfloat16, the default, would have the run go on from rounded weights.
                self.checkpointer.save_checkpoint(
                    self.model, self.opt, epoch, float_dtype=torch.float32
                )
                self.checkpointer.save_scheduler_state_dict(self.scheduler, epoch)
            finally:
                self.checkpointer.path = checkpoints
            _keep_latest(settings.out / UNFINISHED / str(epoch), checkpoints)

    return ResumableTrainer(model, config, training, validation)


def _steps_of(loader: Any, epoch: int) -> int:
    loader.batch_sampler.set_epoch(epoch)
    return len(loader)


def _keep_latest(made: Path, checkpoints: Path) -> None:
    """Put a whole checkpoint in place, and take the earlier ones away."""
    checkpoints.mkdir(exist_ok=True)
    _make_durable(made)
    earlier = list(checkpoints.iterdir())
    made.rename(checkpoints / made.name)
    _sync(checkpoints)
    for folder in earlier:
        shutil.rmtree(folder)


def _make_durable(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _export(settings: Settings, model: Any) -> None:
    """Write the draft that vLLM loads; its config last, by which it is known to be whole."""
    import torch

    dtype = getattr(torch, settings.dtype)
    weights = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in model.state_dict().items()
    }
    made = settings.out / UNFINISHED / "draft"
    model.save_pretrained(made, state_dict=weights)
    path = made / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    # What equals a llama's defaults is left out, and then derived otherwise: spell it out.
    config["transformer_layer_config"] |= draft_layer_sizes(
        settings.model, settings.num_draft_layers
    )
    config["dtype"] = settings.dtype
    config.pop("auto_map", None)  # of speculators' config class, whose text is not beside it
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _make_durable(made)
    for name in (WEIGHTS, CONFIG):
        (made / name).rename(settings.out / name)
    _sync(settings.out)
    shutil.rmtree(settings.out / UNFINISHED)


def _summary(
    settings: Settings,
    plan: Plan,
    data: TrainingData,
    vocabulary: Vocabulary,
    parts: tuple[Sequence[int], Sequence[int]],
    history: History,
) -> Summary:
    validations = {each.epoch: each for each in history.validations}
    last_epoch = max(validations, default=UNTRAINED)
    drawing = settings.out / PLOT
    samples = data.folder
    return Summary(
        draft=settings.out,
        plan=plan,
        layers=samples.layers,
        served_layers=tuple(served_layer_ids(samples.layers[:-1])),
        vocabulary=vocabulary,
        training_samples=len(parts[0]),
        validation_samples=len(parts[1]),
        missing_samples=max(0, (samples.expected or 0) - len(samples.files)),
        cut_samples=sum(length - 1 > settings.sequence_length for length in data.lengths),
        steps=len(history.steps),
        runs=history.runs,
        first=history.steps[0],
        last=history.steps[-1],
        untrained=validations.get(UNTRAINED),
        validation=validations[last_epoch] if last_epoch != UNTRAINED else None,
        seconds=history.seconds,
        plot=drawing if drawing.is_file() else None,
    )
