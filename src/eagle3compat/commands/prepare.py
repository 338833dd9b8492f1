"""``eagle3compat prepare``: conversations in, token ids and loss masks out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

SECONDS_A_LINE = 60

if TYPE_CHECKING:
    from eagle3compat.kimi.preparation import Account, Progress, Request


def prepare(
    model: Annotated[
        Path, typer.Option(help="Folder of the verifier's checkpoint; weights are not needed.")
    ],
    data: Annotated[
        str,
        typer.Option(
            help="Conversations: a .jsonl file with messages or conversations in each line (or "
            "input_ids and loss_mask), or a name or path that the package datasets loads."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="Folder for the samples; new, empty, or of a run that is to go on."),
    ],
    split: Annotated[str, typer.Option(help="Which split of a data set.")] = "train",
    configuration: Annotated[
        Optional[str],  # noqa: UP045 - typer on Python 3.10 reads this form alone
        typer.Option(help="Which configuration of a data set."),
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(min=2, help="Longest sample in tokens, plus the one sampled.")
    ] = 2048,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut longer samples instead of dropping them.")
    ] = False,
    own: Annotated[
        bool,
        typer.Option(
            "--own", help="Do not ask speculators' own preprocessing, even where it is right."
        ),
    ] = False,
    processes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Processes that share the work. Default: as many as pay."),
    ] = None,
) -> None:
    """Turn conversations into token ids and loss masks, with an account of every row.

    Masks mark what assistant turns add: thinking, text and tool calls, without the end marker, as
    speculators' do. A run that was stopped goes on when called again.
    """
    from eagle3compat.kimi.preparation import Request
    from eagle3compat.kimi.row_preparer import RowSettings

    request = Request(
        data=data,
        out=out,
        rows=RowSettings(model, max_model_len, truncate, ask_speculators=not own),
        configuration=configuration,
        split=split,
        processes=processes,
    )
    for line in account_lines(prepare_with_progress(request)):
        typer.echo(line)


def prepare_with_progress(request: Request) -> Account:
    """Prepare, with progress on standard error."""
    from eagle3compat.kimi.preparation import prepare_data

    with _progress() as advance:
        return prepare_data(request, advance)


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, a line a minute elsewhere, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_a_minute()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[samples]} samples of {task.fields[rows]} rows"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("preparing", total=None, samples=0, rows=0)

        def advance(progress: Progress) -> None:
            bars.update(
                task,
                total=progress.size,
                completed=progress.done,
                samples=progress.samples,
                rows=progress.rows,
            )

        yield advance


def _line_a_minute() -> Callable[[Progress], None]:
    last = time.monotonic()

    def advance(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last < SECONDS_A_LINE:
            return
        last = time.monotonic()
        share = f" ({progress.done / progress.size:.0%})" if progress.size else ""
        typer.echo(f"{progress.samples} samples of {progress.rows} rows{share}", err=True)

    return advance


def account_lines(account: Account) -> list[str]:
    """What was done, for the user: every row is accounted for."""
    from eagle3compat.kimi.frequencies import FREQUENCY_FILE
    from eagle3compat.kimi.prepared_folder import DROPPED_FILE

    tally, out = account.tally, account.request.out
    through = ", ".join(f"{count} by {name}" for name, count in sorted(tally.through.items()))
    lines = [
        f"rows         {tally.rows}",
        f"samples      {tally.samples} in {out} ({through})",
        f"tokens       {tally.tokens}, of which {tally.marked} are marked",
        f"longest      {tally.longest} tokens",
        f"frequencies  {out / FREQUENCY_FILE}",
        f"route        {account.route}",
    ]
    lines += [f"note         {text}: {count}" for text, count in sorted(tally.notes.items())]
    lines += [f"dropped      {text}: {count}" for text, count in sorted(tally.dropped.items())]
    if tally.cut:
        lines.append(f"cut          {tally.cut} samples")
    if account.remarks:
        lines.append(f"reasons      {out / DROPPED_FILE}, such as:")
        lines += [f"             {each['source']}: {each['reason']}" for each in account.remarks]
    if account.resumed:
        lines.append(f"resumed      {account.resumed} parts were there")
    lines.append(f"seconds      {account.seconds:.1f}")
    return lines
