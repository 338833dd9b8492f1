"""speculators' draft model, data set, sampler and trainer, put together for one training.

Everything here is speculators' own, of the version that is installed; what is added keeps a run
exact across a kill, and completes the config of the draft that comes out.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.errors import InputError
from eagle3compat.kimi.draft import draft_layer_sizes
from eagle3compat.kimi.metrics import LOGGER, UNTRAINED, Recorder, Report
from eagle3compat.kimi.storage import sync_file, sync_folder
from eagle3compat.kimi.verifier import read_config
from eagle3compat.kimi.vocabulary import load_arrays
from eagle3compat.verifier_parts import served_layer_ids

if TYPE_CHECKING:
    from eagle3compat.kimi.training import Settings
    from eagle3compat.kimi.training_data import TrainingData
    from eagle3compat.kimi.vocabulary import Vocabulary

ATTENTION = "simple_flex_attention"
"""The name by which speculators registers its attention, masks and all, with transformers."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"
METRICS, VOCABULARY = "metrics.jsonl", "vocabulary"
CHECKPOINTS, UNFINISHED = "checkpoints", "unfinished"


@dataclass(frozen=True)
class Job:
    """One training, settled.

    Args:
        settings: of the user.
        layers: extraction's layer ids in the order of the files' tensors, the target's last.
        data: the sample files.
        vocabulary: the draft's.
        training: numbers of the samples that are trained on.
        validation: numbers of those that are held back.
    """

    settings: Settings
    layers: tuple[int, ...]
    data: TrainingData
    vocabulary: Vocabulary
    training: tuple[int, ...]
    validation: tuple[int, ...]


def run_training(job: Job, report: Report | None) -> None:
    """Train to the end, from the latest checkpoint where there is one, and write the draft.

    Raises:
        InputError: an epoch has fewer steps than parts.
    """
    import torch

    settings = job.settings
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shutil.rmtree(settings.out / UNFINISHED, ignore_errors=True)
    with _recorded(settings, report) as recorder:
        torch.manual_seed(settings.seed)
        model = _make_draft(job)
        trainer = _make_trainer(job, model, device, recorder)
        trainer.run_training()
        _export(settings, model)
        recorder.append({"kind": "end"})


@contextmanager
def _recorded(settings: Settings, report: Report | None) -> Iterator[Recorder]:
    """speculators' figures go to ``metrics.jsonl``, and its chatter nowhere."""
    import loguru
    from transformers.utils import logging as transformers_logging

    from eagle3compat import __version__

    recorder = Recorder(settings.out / METRICS, report)
    logger = logging.getLogger(LOGGER)
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(recorder)
    loguru.logger.disable("speculators")
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        recorder.append({"kind": "run", "eagle3compat": __version__})
        yield recorder
    finally:
        loguru.logger.enable("speculators")
        if bars:
            transformers_logging.enable_progress_bar()
        logger.removeHandler(recorder)
        logger.setLevel(level)
        logger.propagate = propagate
        recorder.close()


def _make_draft(job: Job) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers.models.llama.configuration_llama import LlamaConfig

    settings = job.settings
    checkpoint = read_config(settings.model)
    verifier = VerifierConfig(
        name_or_path=str(settings.model.resolve()),
        architectures=checkpoint.get("architectures") or [],
    )
    layer = LlamaConfig(**draft_layer_sizes(settings.model, settings.num_draft_layers))
    layer._attn_implementation = ATTENTION
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=job.vocabulary.size,
        norm_before_residual=settings.norm_before_residual,
        eagle_aux_hidden_state_layer_ids=served_layer_ids(job.layers[:-1]),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=settings.ttt_steps)],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )
    d2t, t2d = load_arrays(settings.out / VOCABULARY, job.vocabulary)
    return Eagle3DraftModel(config=config, t2d=t2d, d2t=d2t)


# --- samples, batches, epochs --------------------------------------------------------------------


class PartsOfEpochs:
    """A batch sampler's epochs, each in parts: to speculators' trainer, a part is an epoch.

    The trainer saves a checkpoint and validates after each, and can go on there.

    Args:
        sampler: yields the batches of an epoch, by ``set_epoch``.
        parts: of each epoch; 0 to give the first epoch again and again, whole.
    """

    def __init__(self, sampler: Any, parts: int) -> None:
        self._sampler = sampler
        self._parts = parts
        self.set_epoch(0)

    def set_epoch(self, number: int) -> None:
        """Choose a part, counted from the first one of the first epoch."""
        epoch, part = divmod(number, self._parts) if self._parts else (0, 0)
        parts = self._parts or 1
        self._sampler.set_epoch(epoch)
        batches = [[int(index) for index in batch] for batch in self._sampler]
        first, last = (len(batches) * bound // parts for bound in (part, part + 1))
        self._batches = batches[first:last]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _loader(job: Job, chosen: Sequence[int], device: Any, *, parts: int, noise: float) -> Any:
    """Chosen samples, packed into sequences; None where there are none."""
    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.noise_transforms import AddUniformNoise
    from torch.utils.data import DataLoader

    if not chosen:
        return None
    settings, data = job.settings, job.data
    dataset = Eagle3SampleFileDataset(
        max_len=settings.sequence_length,
        file_list=[str(data.samples.files[index]) for index in chosen],
        transform=AddUniformNoise(std=noise) if noise else None,
        standardize_fn=_in_served_order(job.layers),
    )
    with warnings.catch_warnings():
        # Samples that are cut are counted in the summary.
        warnings.filterwarnings("ignore", message="Found .* samples longer")
        sampler = MultipackDistributedBatchSamplerV2(
            batch_max_length=settings.sequence_length,
            # Shifting takes the first token of each. What the data set has itself is a guess by
            # file sizes, by which a batch may hold more than fits, and loses it.
            lengths=[max(data.lengths[index] - 1, 1) for index in chosen],
            num_replicas=1,
            rank=0,
            seed=settings.seed,
        )
    return DataLoader(
        dataset,
        batch_sampler=PartsOfEpochs(sampler, parts),
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


# --- the trainer ---------------------------------------------------------------------------------


def _make_trainer(job: Job, model: Any, device: Any, recorder: Recorder) -> Any:
    """speculators' trainer, which saves whole checkpoints that a run goes on from exactly."""
    import torch
    from speculators.train.trainer import Trainer, TrainerConfig

    settings, parts = job.settings, job.settings.checkpoints_per_epoch
    training = _loader(job, job.training, device, parts=parts, noise=settings.noise)
    validation = _loader(job, job.validation, device, parts=0, noise=0.0)
    steps = _steps(training, settings.epochs * parts)
    calls = {
        "use_off_policy_tokens": False,
        "ttt_steps": settings.ttt_steps,
        "ttt_step_loss_decay": settings.ttt_step_loss_decay,
    }
    config = TrainerConfig(
        lr=settings.learning_rate,
        num_epochs=len(steps),
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
            if self.current_epoch == 0:
                recorder.epoch = UNTRAINED
                self.val_epoch(0)
            super().run_training()

        def train_epoch(self, epoch: int) -> None:
            # Whatever came before, it draws the same noise and counts on from the same step.
            torch.manual_seed(settings.seed + 1 + epoch)
            recorder.epoch = epoch // parts
            self.global_step = recorder.step = sum(steps[:epoch])
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


def _steps(loader: Any, parts: int) -> list[int]:
    """The steps of each part of each epoch."""
    steps = []
    for part in range(parts):
        loader.batch_sampler.set_epoch(part)
        steps.append(len(loader))
    if not min(steps):
        raise InputError(
            "--checkpoints-per-epoch: an epoch has fewer steps than that; give a smaller number"
        )
    return steps


# --- whole or not at all -------------------------------------------------------------------------


def _keep_latest(made: Path, checkpoints: Path) -> None:
    """Put a whole checkpoint in place, and take the earlier ones away."""
    checkpoints.mkdir(exist_ok=True)
    _make_durable(made)
    earlier = list(checkpoints.iterdir())
    made.rename(checkpoints / made.name)
    sync_folder(checkpoints)
    for folder in earlier:
        shutil.rmtree(folder)


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
    complete_config(made / CONFIG, settings)
    _make_durable(made)
    for name in (WEIGHTS, CONFIG):
        (made / name).rename(settings.out / name)
    sync_folder(settings.out)
    shutil.rmtree(settings.out / UNFINISHED)


def complete_config(path: Path, settings: Settings) -> None:
    """Spell out what speculators leaves out of a saved draft's config.

    Args:
        path: of the config.json.
        settings: of the training.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    # What equals a llama's defaults is left out there, and then derived otherwise.
    sizes = draft_layer_sizes(settings.model, settings.num_draft_layers)
    config["transformer_layer_config"] |= sizes
    config["dtype"] = settings.dtype
    config.pop("auto_map", None)  # of speculators' config class, whose text is not beside it
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _make_durable(folder: Path) -> None:
    for path in folder.iterdir():
        sync_file(path)
    sync_folder(folder)
