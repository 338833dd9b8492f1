"""The demo's second half: conversations, hidden states, a draft, and how it serves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from eagle3compat.commands.acceptance import (
    acceptance_table,
    measure_with_progress,
    write_acceptance,
)
from eagle3compat.commands.extract import extract_with_progress
from eagle3compat.commands.extract import summary_lines as extraction_lines
from eagle3compat.commands.prepare import account_lines, prepare_with_progress
from eagle3compat.commands.train import summary_lines as training_lines
from eagle3compat.commands.train import train_with_progress
from eagle3compat.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from eagle3compat.kimi.serving import Acceptance
    from eagle3compat.kimi.training import Settings as TrainingSettings

# speculators' default for eight layers: the auxiliary ones, then the target's.
LAYERS = (2, 4, 5, 7)
CONVERSATIONS = 480
ANSWER_TOKENS = 48
PROMPTS = 16
NEW_TOKENS = 48
MAX_MODEL_LEN = 512
DRAFT_TOKENS = 3
# The text's 64 characters, and some. A map for all of the verifier's tokens vLLM would not take.
DRAFT_VOCABULARY = 128
EPOCHS = 2


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Args:
        page: the report.
        acceptance: of the trained draft and of an untrained one; None where nothing served.
    """

    page: Path
    acceptance: list[Acceptance] | None


def training_settings(model: Path, hidden_states: Path, out: Path) -> TrainingSettings:
    """How a draft of the learnable tiny Kimi-K2.5 is trained in minutes on a CPU."""
    from eagle3compat.kimi.training import Settings

    return Settings(
        model=model,
        hidden_states=hidden_states,
        out=out,
        draft_vocab_size=DRAFT_VOCABULARY,
        epochs=EPOCHS,
        learning_rate=4e-3,
        sequence_length=512,
        ttt_steps=DRAFT_TOKENS,
        dtype="float32",
    )


def learn_and_serve(folder: Path, console: Console, serving_python: Path | None) -> Outcome:
    """From conversations to acceptance lengths, every step through its own command's code.

    Args:
        folder: for everything that is written.
        console: for the table.
        serving_python: interpreter of the environment that serves; None for this one.

    Raises:
        InputError: a sample was set aside.
    """
    model, out = write_verifier(folder), folder / "extraction"
    prepare(folder, model)
    extract(folder, model, out)
    trained = train_with_progress(training_settings(model, out, folder / "draft"))
    _say(*training_lines(trained))
    measured = serve(folder, model, serving_python)
    if measured is not None:
        console.print(acceptance_table(measured))
    return Outcome(report(folder, out, measured), measured)


def write_verifier(folder: Path) -> Path:
    """Write the learnable tiny Kimi-K2.5, and conversations with it."""
    from eagle3compat.kimi.conversations import load_tokenizer
    from eagle3compat.tiny import Variant, write_tiny_kimi
    from eagle3compat.tiny.conversations import learnable_conversations

    model = folder / "learnable"
    write_tiny_kimi(model, variant=Variant(learnable=True))
    rows = learnable_conversations(
        load_tokenizer(model), CONVERSATIONS, answer_tokens=ANSWER_TOKENS
    )
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "conversations.jsonl").write_text(lines, encoding="utf-8")
    return model


def prepare(folder: Path, model: Path) -> None:
    """Conversations to token ids and loss masks."""
    from eagle3compat.kimi.preparation import Request
    from eagle3compat.kimi.row_preparer import RowSettings

    request = Request(
        data=str(folder / "conversations.jsonl"),
        out=folder / "prepared",
        rows=RowSettings(model, MAX_MODEL_LEN, truncate=False),
    )
    _say(*account_lines(prepare_with_progress(request)))


def extract(folder: Path, model: Path, out: Path) -> None:
    """Hidden states of all samples, each proved."""
    from eagle3compat.kimi.extraction import Settings

    summary = extract_with_progress(
        Settings(
            model=model,
            data=folder / "prepared",
            out=out,
            layers=LAYERS,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=2048,
            dtype="float32",
        )
    )
    _say(*extraction_lines(summary))
    if summary.set_aside or summary.unproved:
        raise InputError(f"{out}: not every sample is proved; nothing is trained on it")


def serve(folder: Path, model: Path, serving_python: Path | None) -> list[Acceptance] | None:
    """Acceptance lengths of the draft and of an untrained one; None where vLLM takes no draft."""
    from eagle3compat.kimi.other_drafts import write_untrained_draft
    from eagle3compat.kimi.serving import (
        ServingSettings,
        check_takes_drafts,
        find_serving_build,
    )

    try:
        check_takes_drafts(find_serving_build(serving_python))
    except InputError as error:
        if serving_python is not None:
            raise
        _say(f"not served   {error}", "             --serving-python names another environment")
        return None
    write_untrained_draft(model, folder / "draft", folder / "untrained")
    return measure_with_progress(
        ServingSettings(
            model=model,
            drafts={"trained": folder / "draft", "untrained": folder / "untrained"},
            prompts=questions(model),
            new_tokens=NEW_TOKENS,
            draft_tokens=DRAFT_TOKENS,
            dtype="float32",
            python=serving_python,
        )
    )


def questions(model: Path) -> list[list[int]]:
    """Token ids of questions that no draft was trained on."""
    from eagle3compat.kimi.conversations import Renderer, load_tokenizer
    from eagle3compat.tiny.conversations import learnable_conversations

    tokenizer = load_tokenizer(model)
    render = Renderer(tokenizer).render
    samples = (
        sample
        for row in learnable_conversations(tokenizer, PROMPTS, seed=1)
        for sample in render(row["messages"])
    )
    return [sample.input_ids[: sample.loss_mask.index(1)] for sample in samples]


def report(folder: Path, out: Path, measured: list[Acceptance] | None) -> Path:
    """The HTML page on all of it."""
    from eagle3compat.kimi.report_page import ReportSettings, write_report

    figures = None
    if measured is not None:
        figures = folder / "acceptance.json"
        write_acceptance(measured, figures)
    return write_report(ReportSettings(out, draft=folder / "draft", acceptance=figures))


def _say(*lines: str) -> None:
    for line in lines:
        typer.echo(line)
