"""Samples extracted once more, each alone, and compared with their files.

It goes through speculators' own generator and its own way back to the parent, not through the
writers that made the files: one engine, each sample in a call of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import eagle3compat
from eagle3compat.installed import find_build
from eagle3compat.kimi.agreement import Agreement, compare_rows
from eagle3compat.kimi.extraction import check_in_process_route, config_values
from eagle3compat.kimi.findings import Finding, Kind, rows_in_words
from eagle3compat.kimi.sample_scan import UnreadableSampleError, load_sample
from eagle3compat.kimi.verifier import read_verifier

if TYPE_CHECKING:
    import torch

    from eagle3compat.kimi.audit import AuditReport, AuditSettings, Watch


@dataclass(frozen=True)
class Candidate:
    """A sample that may be extracted anew.

    Args:
        index: its number.
        place: its file, relative to the audited folder.
    """

    index: int
    place: Path


@dataclass(frozen=True)
class Engine:
    """What the samples are extracted with.

    Args:
        model: folder of the verifier.
        layers: layer ids of the files, in their order.
        tensor_parallel_size: GPUs that share the verifier.
    """

    model: Path
    layers: Sequence[int]
    tensor_parallel_size: int = 1


def check_anew(
    report: AuditReport,
    settings: AuditSettings,
    engine: Engine,
    candidates: Sequence[Candidate],
    watch: Watch,
) -> None:
    """Extract a random share of the samples anew, and add to the report what differs.

    Args:
        report: of the audit so far.
        settings: of the audit.
        engine: to extract with.
        candidates: the samples to choose from.
        watch: told of the progress.

    Raises:
        InputError: no such builds are installed, the verifier cannot be read, or its settings are
            not accepted.
        Refusal: these builds do not work together.
    """
    layers = engine.layers
    verifier = read_verifier(engine.model)
    verifier.check_layers(layers)
    check_in_process_route(find_build("speculators"))
    find_build("vllm")
    count = settings.again_of(len(candidates))
    chosen = random.Random(settings.seed).sample(list(candidates), count)
    chosen.sort(key=lambda each: each.index)
    samples = _load(settings.folder, chosen, (len(layers), verifier.hidden_size))
    if not samples:
        report.not_checked.append("extracting anew: none of the chosen files has states to compare")
        return
    dtype = str(samples[0][1]["hidden_states"][0].dtype).removeprefix("torch.")
    verifier.check_dtype(dtype)
    plan = eagle3compat.apply()
    report.checked.append(
        f"{len(samples)} of {len(candidates)} samples (seed {settings.seed}) extracted anew, each "
        f"alone, by {plan.consumer.title} on {plan.provider.title}"
    )
    report.again = tuple(candidate.index for candidate, _ in samples)
    watch("starting the engine", 0, len(samples))
    answers = extract_alone(engine, dtype, [sample for _, sample in samples])
    for number, ((candidate, sample), states) in enumerate(
        zip(samples, answers, strict=True), start=1
    ):
        agreements = [
            compare_rows(found, expected, layer)
            for found, expected, layer in zip(sample["hidden_states"], states, layers, strict=True)
        ]
        _report(report, candidate, layers, agreements)
        watch("extracting anew", number, len(samples))


def extract_alone(
    engine: Engine, dtype: str, samples: Sequence[dict[str, Any]]
) -> Iterator[list[torch.Tensor]]:
    """The hidden states of samples, each from a call of the generator of its own.

    Args:
        engine: to extract with.
        dtype: of weights and states.
        samples: as `eagle3compat.kimi.sample_scan.load_sample` gives them.
    """
    from speculators.data_generation import vllm_hidden_states_generator as module

    longest = max(len(sample["input_ids"]) for sample in samples)
    with config_values(module, {"ModelConfig": {"dtype": dtype}}):
        generator = module.VllmHiddenStatesGenerator(
            model_path=str(engine.model),
            layer_ids=list(engine.layers),
            max_model_len=max(64, longest + 1),
            tensor_parallel_size=engine.tensor_parallel_size,
        )
    try:
        for sample in samples:
            (result,) = generator.generate([sample["input_ids"].tolist()])
            yield result["hidden_states"]
    finally:
        generator.executor.shutdown()


def _load(
    folder: Path, chosen: Sequence[Candidate], sizes: tuple[int, int]
) -> list[tuple[Candidate, dict[str, Any]]]:
    """The chosen samples that can be compared: of so many layers, and of that hidden size."""
    loaded = []
    for candidate in chosen:
        try:
            sample = load_sample(folder / candidate.place)
        except UnreadableSampleError:
            continue
        shapes = [tuple(states.shape) for states in sample["hidden_states"]]
        if shapes == [(len(sample["input_ids"]), sizes[1])] * sizes[0]:
            loaded.append((candidate, sample))
    return loaded


def _report(
    report: AuditReport,
    candidate: Candidate,
    layers: Sequence[int],
    agreements: Sequence[Agreement],
) -> None:
    for layer, agreement in zip(layers, agreements, strict=True):
        worst = max(agreement.worst, report.again_worst.get(layer, (0.0, 0.0))[0])
        report.again_worst[layer] = (worst, agreement.bound)
        if not agreement.holds:
            what = (
                f"layer {layer}: {rows_in_words(agreement.faulty_rows)} of {agreement.rows} "
                f"{'differs' if len(agreement.faulty_rows) == 1 else 'differ'} from the same, "
                f"extracted anew (largest relative error {agreement.worst:.2g}; rounding explains "
                f"{agreement.bound:.2g})"
            )
            report.findings.append(
                Finding(Kind.EXTRACTED_ANEW, str(candidate.place), what, candidate.index)
            )
