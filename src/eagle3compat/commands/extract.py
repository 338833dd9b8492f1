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

    from eagle3compat.kimi.extraction import Settings, Summary
    from eagle3compat.kimi.manifest import SampleRecord
    from eagle3compat.kimi.storage import Shard


# Sequences that the generator schedules at once (its MAX_NUM_SEQS); vLLM wants a token for each.
GENERATOR_SEQUENCES = 32


class Dtype(str, Enum):
    """The dtypes that the verifier can be run in."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


MaxModelLen = Annotated[
    int, typer.Option(min=2, help="Longest sequence in tokens, plus the one sampled.")
]
TensorParallelSize = Annotated[int, typer.Option(min=1, help="GPUs that share the verifier.")]
StatesDtype = Annotated[Dtype, typer.Option(help="Of weights and hidden states.")]


def extract(
    model: Annotated[Path, typer.Option(help="Folder of the verifier's checkpoint.")],
    data: Annotated[
        Path,
        typer.Option(
            help="What prepare wrote; or one JSON object a line: input_ids and loss_mask (without "
            "a mask every token counts), or messages or conversations for the checkpoint's chat "
            "template."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the manifest and, in hidden_states, data_0.pt, data_1.pt, …; new or "
            "empty, or that of an extraction to go on with."
        ),
    ],
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layer ids, as in 2,4,5,7: the auxiliary ones, then the target's. "
            "An id means the output of that layer. Default: that of speculators."
        ),
    ] = None,
    max_model_len: MaxModelLen = 2048,
    tensor_parallel_size: TensorParallelSize = 1,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=GENERATOR_SEQUENCES,
            help="Token budget of one engine step. Default: speculators' own.",
        ),
    ] = None,
    dtype: StatesDtype = Dtype.AUTO,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Sequences in one engine step at most.")
    ] = 32,
    shard: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Extract the I-th of N parts of the data set, I from 0. Parts may share a folder, "
            "or be moved into one.",
        ),
    ] = "0/1",
    writers: Annotated[
        int | None, typer.Option(min=1, help="Threads that write. Default: one a core, at most 8.")
    ] = None,
) -> None:
    """Extract hidden states from inside vLLM, each sample proved; a rerun goes on.

    Exits with 1 when samples were set aside.
    """
    from eagle3compat.kimi.extraction import Settings

    settings = Settings(
        model=model,
        data=data,
        out=out,
        layers=None if layers is None else parse_layers(layers),
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        dtype=dtype.value,
        shard=parse_shard(shard),
        **({} if writers is None else {"writers": writers}),
    )
    summary = extract_with_progress(settings)
    for line in summary_lines(summary):
        typer.echo(line)
    if summary.set_aside:
        raise typer.Exit(1)


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


def parse_shard(text: str) -> Shard:
    """A shard from ``0/4``, the first of four.

    Raises:
        InputError: it is not a number, a slash and a larger number.
    """
    from eagle3compat.kimi.storage import Shard

    number, slash, count = text.partition("/")
    if slash and number.isdecimal() and count.isdecimal() and int(number) < int(count):
        return Shard(int(number), int(count))
    raise InputError(f"--shard {text}: expected I/N with I from 0 to N-1, as in 0/4")


def extract_with_progress(settings: Settings) -> Summary:
    """Check, apply, extract and write, with a progress bar on standard error."""
    from eagle3compat.kimi.extraction import carry_out, prepare

    job = prepare(settings)
    with _progress(job.tokens) as advance:
        return carry_out(job, advance)


@contextmanager
def _progress(total_tokens: int) -> Iterator[Callable[[SampleRecord], None]]:
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

        def advance(record: SampleRecord) -> None:
            progress.update(task, description="extracting", advance=record.tokens)

        yield advance


def summary_lines(summary: Summary) -> list[str]:
    """What was done, for the user: builds, shims, figures."""
    job = summary.job
    before = len(job.settings.shard.indices(len(job.samples))) - len(job.todo)
    rate = f", {summary.tokens / summary.seconds:,.0f} tokens a second" if summary.seconds else ""
    lines = [
        f"vllm         {job.plan.provider.title}",
        f"speculators  {job.plan.consumer.title}",
        *shim_lines(job.plan),
        f"layers       {', '.join(map(str, job.layers))}",
        f"samples      {summary.done} in {job.folder.samples}",
        f"tokens       {summary.tokens}",
        f"bytes        {summary.written_bytes}",
        f"seconds      {summary.seconds:.1f} after {summary.engine_seconds:.1f} until the engine "
        f"was up{rate}",
    ]
    if before:
        lines.append(f"note         samples that earlier runs had done: {before}")
    if job.samples.unmasked:
        lines.append(
            "note         rows without loss_mask, of which every token counts: "
            f"{job.samples.unmasked}"
        )
    if summary.unproved:
        lines.append(f"note         next tokens were not proved: {summary.unproved}")
    lines.extend(
        f"SET ASIDE    sample {record.index} of line {record.line}: {record.reason}"
        for record in summary.set_aside
    )
    return lines
