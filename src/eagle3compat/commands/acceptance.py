"""``eagle3compat acceptance``: how many of a draft's tokens the verifier accepts, in real vLLM."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3compat.commands.extract import Dtype

if TYPE_CHECKING:
    from rich.table import Table

    from eagle3compat.kimi.serving import Acceptance, ServingSettings


def acceptance(
    model: Annotated[Path, typer.Option(help="Folder of the verifier's checkpoint.")],
    draft: Annotated[
        list[Path], typer.Option(help="Folder of a draft. Repeatable: each is served in turn.")
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            help="Data set, as for extract: what comes before a sample's first token to be learnt "
            "is the prompt."
        ),
    ],
    limit: Annotated[int, typer.Option(min=1, help="Prompts to take, from the first.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate after each.")] = 64,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens a proposal. Default: the draft's own.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of verifier and draft.")] = Dtype.AUTO,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Default: the longest prompt with its new tokens.")
    ] = None,
    serving_python: Annotated[
        Path | None,
        typer.Option(
            help="Interpreter of the environment whose vLLM serves; eagle3compat need not be in "
            "it. Default: this one."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the figures for the report.")
    ] = None,
) -> None:
    """Serve drafts with real vLLM and measure their acceptance lengths.

    A step of the verifier yields 1 + accepted tokens / drafts tokens: 1 is what it yields alone.
    """
    from rich.console import Console

    from eagle3compat.kimi.serving import ServingSettings

    settings = ServingSettings(
        model=model,
        drafts=_named(draft),
        prompts=_read_prompts(model, prompts, limit),
        new_tokens=new_tokens,
        draft_tokens=draft_tokens,
        dtype=dtype.value,
        max_model_len=max_model_len,
        python=serving_python,
    )
    measured = measure_with_progress(settings)
    Console().print(acceptance_table(measured))
    if out is not None:
        write_acceptance(measured, out)
        typer.echo(f"figures      {out}")


def measure_with_progress(settings: ServingSettings) -> list[Acceptance]:
    """Measure; each draft's figures are a line on standard output as they come."""
    from rich.console import Console

    from eagle3compat.kimi.serving import measure_acceptance

    started = time.monotonic()

    def report(figures: Acceptance) -> None:
        after = time.monotonic() - started
        typer.echo(
            f"{figures.name}: acceptance length {figures.acceptance_length:.3f} ({after:.0f} s)"
        )

    count = len(settings.drafts)
    words = f"serving {count} draft{'s' * (count != 1)} (an engine takes a minute or two to start)"
    with Console(stderr=True).status(words):
        return measure_acceptance(settings, report)


def acceptance_table(measured: Sequence[Acceptance]) -> Table:
    """The figures of all drafts side by side."""
    from rich import box
    from rich.table import Table

    title = f"acceptance, greedily, vLLM {measured[0].vllm}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("draft")
    places = max(len(figures.accepted_at) for figures in measured)
    numbers = (f"token {place}" for place in range(1, places + 1))
    for column in ("layers", "acceptance length", *numbers, "drafts", "tokens/s"):
        table.add_column(column, justify="right")
    for figures in measured:
        tokens = sum(map(len, figures.texts))
        table.add_row(
            figures.name,
            ", ".join(map(str, figures.layer_ids)),
            f"{figures.acceptance_length:.3f}",
            *(f"{rate:.3f}" for rate in figures.rates),
            *("" for _ in range(places - len(figures.rates))),
            str(figures.drafts),
            f"{tokens / figures.seconds:.0f}",
        )
    return table


def write_acceptance(measured: Sequence[Acceptance], out: Path) -> None:
    """Write the figures for ``eagle3compat report --acceptance``.

    Raises:
        InputError: the file cannot be written.
    """
    from eagle3compat.errors import InputError
    from eagle3compat.kimi.storage import write_whole

    text = json.dumps([figures.to_json() for figures in measured], indent=1) + "\n"
    try:
        write_whole(out, lambda stream: stream.write(text.encode("utf-8")))
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written ({error})") from error


def _named(drafts: Sequence[Path]) -> Mapping[str, Path]:
    """Drafts by the names of their folders, or, where those are the same, by their paths."""
    names = [draft.resolve().name for draft in drafts]
    return {
        name if names.count(name) == 1 else str(draft): draft
        for name, draft in zip(names, drafts, strict=True)
    }


def _read_prompts(model: Path, data: Path, limit: int) -> list[list[int]]:
    from eagle3compat.kimi.dataset import SampleFile
    from eagle3compat.kimi.serving import prompts_of
    from eagle3compat.kimi.verifier import read_verifier

    samples = SampleFile(data, read_verifier(model), sys.maxsize)
    return prompts_of(samples[:limit])
