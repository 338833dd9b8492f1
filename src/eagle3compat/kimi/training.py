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
    checkpoints/{number}/              the latest, as speculators saves it, but in float32
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import InputError, Refusal
from eagle3compat.kimi.draft_trainer import CONFIG, METRICS, VOCABULARY, Job, run_training
from eagle3compat.kimi.metrics import (
    UNTRAINED,
    Figures,
    History,
    Report,
    can_plot,
    plot,
    read_history,
)
from eagle3compat.kimi.storage import try_lock, write_whole
from eagle3compat.kimi.training_data import TrainingData, find_layers, find_samples, read_samples
from eagle3compat.kimi.verifier import Verifier, read_verifier
from eagle3compat.kimi.vocabulary import Vocabulary, make_vocabulary, settle_size
from eagle3compat.verifier_parts import served_layer_ids

if TYPE_CHECKING:
    from eagle3compat.plan import Plan

MASK_BLOCK = 128
"""Tokens in a block of flex attention's mask, which the sequence length has to be a multiple of."""
SETTINGS, PLOT, LOCK = "training.json", "training.svg", "training.lock"
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
        checkpoints_per_epoch: how often in an epoch a checkpoint is saved, from which a run goes on
            after a kill, and the draft is validated; the last time is the epoch's end.
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
    checkpoints_per_epoch: int = 1
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
    verifier, size = check_settings(settings)
    layers = find_layers(settings.hidden_states, verifier, settings.layers)
    samples = find_samples(settings.hidden_states)
    with _locked(settings.out), shims_applied() as plan:
        data = read_samples(samples, verifier, len(layers))
        training, validation = split(len(data.lengths), settings.validation_share, settings.seed)
        _claim(settings, data, layers)
        vocabulary = make_vocabulary(
            settings.out / VOCABULARY, data.counts, data.digest, size, verifier.vocab_size
        )
        job = Job(settings, layers, data, vocabulary, training, validation)
        history = read_history(settings.out / METRICS)
        if not (history.ended and (settings.out / CONFIG).is_file()):
            run_training(job, report)
            history = read_history(settings.out / METRICS)
        if can_plot():
            plot(history, settings.out / PLOT)
        return _summary(job, plan, history)


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


def check_settings(settings: Settings) -> tuple[Verifier, int]:
    """Check what can be checked without opening a sample, and importing nothing.

    Returns:
        The verifier, and the draft's vocabulary size.

    Raises:
        InputError: a setting, the checkpoint or the folder of samples cannot be used.
    """
    positive = ("learning_rate", "sequence_length", "ttt_steps", "num_draft_layers")
    for name in ("epochs", "checkpoints_per_epoch", *positive):
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
    find_layers(settings.hidden_states, verifier, settings.layers)
    find_samples(settings.hidden_states)
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
        if not try_lock(stream):
            raise InputError(f"--out {out}: another training is running in it")
        yield


def _claim(settings: Settings, data: TrainingData, layers: tuple[int, ...]) -> None:
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
        "layers": list(layers),
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


def _summary(job: Job, plan: Plan, history: History) -> Summary:
    settings, samples = job.settings, job.data.samples
    validations = history.validations
    drawing = settings.out / PLOT
    return Summary(
        draft=settings.out,
        plan=plan,
        layers=job.layers,
        served_layers=tuple(served_layer_ids(job.layers[:-1])),
        vocabulary=job.vocabulary,
        training_samples=len(job.training),
        validation_samples=len(job.validation),
        missing_samples=max(0, (samples.expected or 0) - len(samples.files)),
        cut_samples=sum(length - 1 > settings.sequence_length for length in job.data.lengths),
        steps=len(history.steps),
        runs=history.runs,
        first=history.steps[0],
        last=history.steps[-1],
        untrained=next((each for each in validations if each.epoch == UNTRAINED), None),
        validation=next((each for each in validations[::-1] if each.epoch != UNTRAINED), None),
        seconds=history.seconds,
        plot=drawing if drawing.is_file() else None,
    )
