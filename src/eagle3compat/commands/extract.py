"""``eagle3compat extract``: a data set in, the trainer's sample files out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3compat.commands.showing import shim_lines
from eagle3compat.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from eagle3compat.kimi.dataset import Sample
    from eagle3compat.kimi.extraction import Settings, Summary


# Sequences that the generator schedules at once (its MAX_NUM_SEQS); vLLM wants a token for each.
GENERATOR_SEQUENCES = 32


class Dtype(str, Enum):
    """The dtypes that the verifier can be run in."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def extract(
    model: Annotated[Path, typer.Option(help="Folder of the verifier's checkpoint.")],
    data: Annotated[
        Path,
        typer.Option(
            help="Data set, one JSON object a line: input_ids and loss_mask (without a mask every "
            "token counts), or messages or conversations for the checkpoint's chat template."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for data_0.pt, data_1.pt, …; new or empty.")],
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layer ids, as in 2,4,5,7: the auxiliary ones, then the target's. "
            "An id means the output of that layer. Default: that of speculators."
        ),
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(min=2, help="Longest sequence in tokens, plus the one sampled.")
    ] = 2048,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="GPUs that share the verifier.")
    ] = 1,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=GENERATOR_SEQUENCES,
            help="Token budget of one engine step. Default: speculators' own.",
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and hidden states.")] = Dtype.AUTO,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences in one call of the generator.")
    ] = 8,
) -> None:
    """Extract hidden states from inside vLLM, with the shims applied and checked."""
    from eagle3compat.kimi.extraction import Settings

    settings = Settings(
        model=model,
        data=data,
        out=out,
        layers=None if layers is None else parse_layers(layers),
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype=dtype.value,
        batch_size=batch_size,
    )
    for line in summary_lines(extract_with_progress(settings)):
        typer.echo(line)


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer ids from ``2,4,5,7``.

    Raises:
        InputError: something between the commas is no integer.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--layers {text}: expected integers with commas between, as in 2,4,5,7"
        ) from None


def extract_with_progress(settings: Settings) -> Summary:
    """Check, apply, extract and write, with a progress bar on standard error."""
    from eagle3compat.kimi.extraction import carry_out, prepare

    job = prepare(settings)
    with _progress(job.tokens) as advance:
        return carry_out(job, advance)


@contextmanager
def _progress(total_tokens: int) -> Iterator[Callable[[Sample], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed} of {task.total} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting the engine", total=total_tokens)

        def advance(sample: Sample) -> None:
            progress.update(task, description="extracting", advance=len(sample.input_ids))

        yield advance


def summary_lines(summary: Summary) -> list[str]:
    """What was done, for the user: builds, shims, figures."""
    job = summary.job
    unmasked = sum(not sample.mask_given for sample in job.samples)
    lines = [
        f"vllm         {job.plan.provider.title}",
        f"speculators  {job.plan.consumer.title}",
        *shim_lines(job.plan),
        f"layers       {', '.join(map(str, job.layers))}",
        f"samples      {len(job.samples)} in {job.settings.out}",
        f"tokens       {job.tokens}",
        f"bytes        {summary.written_bytes}",
        f"seconds      {summary.seconds:.1f}",
    ]
    if unmasked:
        lines.append(
            f"note         rows without loss_mask, of which every token counts: {unmasked}"
        )
    return lines
