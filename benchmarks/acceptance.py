"""Acceptance lengths of one draft fed the right hidden states, the wrong ones, and of none.

    python benchmarks/acceptance.py [--serving-python PYTHON] [--folder NEW] [--epochs 2]

One run shows all peers, on the same verifier (the learnable tiny Kimi-K2.5), the same training data
and settings and the same questions, none of which the drafts were trained on:

right layers      trained on the outputs of layers 2, 4 and 5, served with [3, 5, 6], their ids in
                  vLLM
untrained         of the same shape
trained on wrong  trained on the outputs of layers 1, 3 and 4, served with [2, 4, 5]: as consistent
                  as the first, but each state is of one layer earlier
served one early  the first draft, served with [2, 4, 5], as where extraction's ids are taken for
                  vLLM's
served one late   the first draft, served with [4, 6, 7]

One extraction from inside vLLM gives the states of all these layers, every sample proved. Both
drafts are trained by the installed speculators, and served by real vLLM. It takes about 10 minutes
on a CPU with two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from eagle3compat.commands.acceptance import (
    acceptance_table,
    measure_with_progress,
    write_acceptance,
)
from eagle3compat.commands.demo import ENVIRONMENT
from eagle3compat.commands.demo_draft import (
    DRAFT_TOKENS,
    MAX_MODEL_LEN,
    NEW_TOKENS,
    prepare,
    questions,
    training_settings,
    write_verifier,
)
from eagle3compat.commands.extract import extract_with_progress
from eagle3compat.commands.train import summary_lines, train_with_progress
from eagle3compat.kimi.other_drafts import write_draft_with_layers, write_untrained_draft
from eagle3compat.kimi.serving import Acceptance, ServingSettings
from eagle3compat.kimi.storage import read_sample

RIGHT, WRONG, TARGET = (2, 4, 5), (1, 3, 4), 7
EXTRACTED = (1, 2, 3, 4, 5, TARGET)
PEERS = ("right layers", "untrained", "trained on wrong", "served one early", "served one late")


def main() -> None:
    """Train both drafts, serve all five, and say whether the wrong ones fall below."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--serving-python", type=Path)
    parser.add_argument("--folder", type=Path, help="keep everything in this new folder")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True)
        sys.exit(compare(arguments.folder, arguments.epochs, arguments.serving_python))
    with tempfile.TemporaryDirectory(prefix="eagle3compat-acceptance-") as folder:
        sys.exit(compare(Path(folder), arguments.epochs, arguments.serving_python))


def compare(folder: Path, epochs: int, serving_python: Path | None) -> int:
    """Do all of it in a folder; 1 where a draft that is fed wrong states serves nearly as well."""
    model = write_verifier(folder)
    prepare(folder, model)
    extract(folder, model)
    drafts = {
        "right layers": train(folder, model, "right", RIGHT, epochs),
        "trained on wrong": train(folder, model, "wrong", WRONG, epochs),
        "untrained": folder / "untrained",
        "served one early": folder / "one_early",
        "served one late": folder / "one_late",
    }
    trained = drafts["right layers"]
    write_untrained_draft(model, trained, drafts["untrained"])
    write_draft_with_layers(trained, drafts["served one early"], RIGHT)
    write_draft_with_layers(trained, drafts["served one late"], [layer + 2 for layer in RIGHT])
    measured = measure_with_progress(
        ServingSettings(
            model=model,
            drafts={name: drafts[name] for name in PEERS},
            prompts=questions(model),
            new_tokens=NEW_TOKENS,
            draft_tokens=DRAFT_TOKENS,
            dtype="float32",
            python=serving_python,
        )
    )
    write_acceptance(measured, folder / "acceptance.json")
    Console(width=110).print(acceptance_table(measured))
    print(json.dumps({each.name: round(each.acceptance_length, 3) for each in measured}))
    return verdict(measured)


def extract(folder: Path, model: Path) -> None:
    """The states of all layers that any of the drafts is trained on."""
    from eagle3compat.kimi.extraction import Settings

    summary = extract_with_progress(
        Settings(
            model=model,
            data=folder / "prepared",
            out=folder / "extraction",
            layers=EXTRACTED,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=2048,
            dtype="float32",
        )
    )
    if summary.set_aside or summary.unproved:
        sys.exit("not every sample is proved")


def train(folder: Path, model: Path, name: str, layers: tuple[int, ...], epochs: int) -> Path:
    """A draft of some of the extracted layers."""
    from dataclasses import replace

    import torch

    states = folder / f"states_{name}"
    states.mkdir()
    chosen = [EXTRACTED.index(layer) for layer in (*layers, TARGET)]
    for path in sorted((folder / "extraction" / "hidden_states").iterdir()):
        sample = dict(read_sample(path))
        sample["hidden_states"] = [sample["hidden_states"][number] for number in chosen]
        torch.save(sample, states / path.name)
    settings = training_settings(model, states, folder / f"draft_{name}")
    summary = train_with_progress(replace(settings, layers=(*layers, TARGET), epochs=epochs))
    print("\n".join(summary_lines(summary)), flush=True)
    return settings.out


def verdict(measured: list[Acceptance]) -> int:
    """0 where the right states serve at 2 or more, and all others leave half of the gain out."""
    lengths = {each.name: each.acceptance_length for each in measured}
    right = lengths.pop("right layers")
    fallen = all(length - 1 < (right - 1) / 2 for length in lengths.values())
    return 0 if right >= 2 and fallen else 1


if __name__ == "__main__":
    main()
