"""``eagle3compat train``: from hidden states to a draft that vLLM serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3compat.commands.extract import parse_layers
from eagle3compat.commands.showing import shim_lines
from eagle3compat.commands.vocab import vocabulary_lines

if TYPE_CHECKING:
    from eagle3compat.kimi.metrics import Figures
    from eagle3compat.kimi.training import Settings, Summary


class Dtype(str, Enum):
    """The dtypes that a draft can be saved in."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def train(
    model: Annotated[Path, typer.Option(help="Folder of the verifier's checkpoint.")],
    hidden_states: Annotated[
        Path, typer.Option(help="Folder of an extraction: hidden_states/data_0.pt, …, manifests.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the draft; an interrupted training there goes on.")
    ],
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layer ids of the sample files, as in 2,4,5,7: each the output of that layer, the "
            "target's last. Wanted where no manifest tells."
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens of the draft. Default: 32,000, or all of a smaller verifier's."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often each sample is seen.")] = 10,
    checkpoints_per_epoch: Annotated[
        int, typer.Option(min=1, help="Checkpoints, and validations, in each epoch.")
    ] = 1,
    learning_rate: Annotated[
        float, typer.Option(help="The highest; it rises for 1 % of the steps, and falls to 0.")
    ] = 1e-4,
    sequence_length: Annotated[
        int, typer.Option(help="Tokens of a step, packed from samples; a multiple of 128.")
    ] = 2048,
    ttt_steps: Annotated[int, typer.Option(min=1, help="Tokens that the draft predicts.")] = 3,
    num_draft_layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the draft.")] = 1,
    noise: Annotated[float, typer.Option(help="Half the width of noise on the states.")] = 0.05,
    validation_share: Annotated[float, typer.Option(help="Share of samples held back.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, split, batches and noise.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the saved weights.")] = Dtype.BFLOAT16,
    device: Annotated[
        str | None, typer.Option(help="Default: a GPU where there is one, else the CPU.")
    ] = None,
    loader_workers: Annotated[
        int, typer.Option(min=0, help="Processes that read samples; 0 reads between steps.")
    ] = 0,
) -> None:
    """Train an EAGLE-3 draft with speculators' own trainer, with the shims applied and checked.

    A training that was interrupted goes on from its latest checkpoint when it is called again.
    """
    from eagle3compat.kimi.training import Settings

    settings = Settings(
        model=model,
        hidden_states=hidden_states,
        out=out,
        layers=None if layers is None else parse_layers(layers),
        draft_vocab_size=draft_vocab_size,
        epochs=epochs,
        checkpoints_per_epoch=checkpoints_per_epoch,
        learning_rate=learning_rate,
        sequence_length=sequence_length,
        ttt_steps=ttt_steps,
        num_draft_layers=num_draft_layers,
        noise=noise,
        validation_share=validation_share,
        seed=seed,
        dtype=dtype.value,
        device=device,
        loader_workers=loader_workers,
    )
    for line in summary_lines(train_with_progress(settings)):
        typer.echo(line)


def train_with_progress(settings: Settings) -> Summary:
    """Train; each validation is a line on standard output, and a spinner tells of the steps."""
    from eagle3compat.kimi.training import check_settings, train_draft

    check_settings(settings)
    with _progress() as report:
        return train_draft(settings, report)


@contextmanager
def _progress() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("reading the samples", total=None)

        def report(line: Mapping[str, Any]) -> None:
            if line["kind"] == "train":
                progress.update(task, description=f"step {line['step'] + 1}, {_of(line)}")
            elif line["kind"] == "validation":
                epoch = line["epoch"] + 1
                name = f"epoch {epoch}" if epoch else "untrained"
                typer.echo(f"{name:<13}validation: {_of(line)}")

        yield report


def _of(line: Mapping[str, Any]) -> str:
    accuracy = " ".join(f"{each:.3f}" for each in line["accuracy"])
    return f"loss {line['loss']:.4f}, accuracy {accuracy}"


def summary_lines(summary: Summary) -> Iterator[str]:
    """What was trained, for the user: builds, shims, figures."""
    plan = summary.plan
    yield f"speculators  {plan.consumer.title}"
    yield from shim_lines(plan)
    yield f"layers       {_listed(summary.layers)}, the output of each"
    yield f"saved as     {_listed(summary.served_layers)}, the input of each, as vLLM counts"
    yield from vocabulary_lines(summary.vocabulary)
    held = f"{summary.validation_samples} held back"
    yield f"samples      {summary.training_samples} trained on, {held}"
    if summary.missing_samples:
        yield f"note         samples of the data set not extracted: {summary.missing_samples}"
    if summary.cut_samples:
        yield f"note         samples cut to the sequence length: {summary.cut_samples}"
    yield f"steps        {summary.steps} in {summary.seconds:.1f} s and {summary.runs} runs"
    yield f"training     {_change(summary.first, summary.last)}"
    if summary.untrained is not None and summary.validation is not None:
        yield f"validation   {_change(summary.untrained, summary.validation)}"
    yield f"draft        {summary.draft}"
    if summary.plot is None:
        yield "note         not drawn: install matplotlib, as in eagle3compat[plots]"
    else:
        yield f"plot         {summary.plot}"


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _change(before: Figures, after: Figures) -> str:
    accuracy = ", ".join(
        f"{one:.3f} -> {other:.3f}"
        for one, other in zip(before.accuracy, after.accuracy, strict=True)
    )
    return f"loss {before.loss:.4f} -> {after.loss:.4f}, accuracy {accuracy}"
