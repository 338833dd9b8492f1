"""``eagle3compat demo``: a tiny Kimi-K2.5 out of real vLLM, compared with transformers."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3compat.commands.demo_draft import learn_and_serve
from eagle3compat.commands.extract import extract_with_progress, summary_lines
from eagle3compat.commands.showing import plan_table
from eagle3compat.errors import InputError
from eagle3compat.plan import DISABLE_VARIABLE, disabled_by_environment

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from eagle3compat.kimi.extraction import Summary
    from eagle3compat.reference import Comparison

# Every layer of the tiny model, asked for from the last to the first.
LAYERS = (7, 6, 5, 4, 3, 2, 1, 0)
MAX_MODEL_LEN = 512
# One engine step takes no more tokens than this: the longest prompts need several.
TOKENS_A_STEP = 96
# Columns; a terminal's own width would cut figures, and a log file has none.
TABLE_WIDTH = 110

CONVERSATIONS = (
    ("How far is the moon?", "About 384,000 kilometres."),
    ("你好", "你好!"),
    ("Add 2 and 2.", "4", "And 3 more?", "7, since 4 and 3 is 7."),
    ("Name a fruit.", "Apple 🍎", "Another.", "Pear", "A third one, please.", "Quince"),
)

# The engine runs on the CPU with little memory, offline (the checkpoint is local) and quietly.
ENVIRONMENT = {
    "VLLM_MLA_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def demo(
    disable: Annotated[
        list[str] | None,
        typer.Option(metavar="SHIM", help="Leave out this shim, to see what breaks. Repeatable."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep everything that is written in this new folder."),
    ] = None,
    extraction_only: Annotated[
        bool, typer.Option("--extraction-only", help="Stop after the comparison.")
    ] = False,
    serving_python: Annotated[
        Path | None,
        typer.Option(
            help="Interpreter of the environment whose vLLM serves the draft, where this one's "
            "takes none (on a CPU, up to 0.19.1)."
        ),
    ] = None,
) -> None:
    """The whole way on a CPU, with tiny Kimi-K2.5 models: hidden states, a draft, its acceptance.

    First, states of prompts that hurt are compared with transformers in float32, every layer of
    every row. Then a draft is trained on conversations, and real vLLM serves it. Exits with 1 when
    any state differs by more than the tolerance.
    """
    from rich.console import Console

    _set_environment(disable or [])
    console = Console(width=TABLE_WIDTH)
    with _folder(keep) as folder:
        summary = _extract(folder, console)
        comparison = _compare(folder, summary)
        console.print(comparison_table(comparison))
        for line in summary_lines(summary):
            typer.echo(line)
        typer.echo(verdict(comparison, disabled_by_environment()))
        if not comparison.agrees():
            raise typer.Exit(1)
        if extraction_only:
            return
        outcome = learn_and_serve(folder, console, serving_python)
        page = outcome.page if keep else _kept(outcome.page)
    typer.echo(f"report       {page}")


def _set_environment(disable: list[str]) -> None:
    from eagle3compat.installed import find_build

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "cpu" in (find_build("vllm").distribution or ""):
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    off = dict.fromkeys((*disabled_by_environment(), *disable))
    os.environ[DISABLE_VARIABLE] = ",".join(off)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="eagle3compat-demo-") as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"--keep {keep}: expected a new folder ({error})") from error
    yield keep


def _kept(page: Path) -> Path:
    """The page, which holds all that it shows, outside of a folder that goes."""
    with tempfile.NamedTemporaryFile(
        prefix="eagle3compat-demo-", suffix=".html", delete=False
    ) as stream:
        stream.write(page.read_bytes())
    return Path(stream.name)


def _extract(folder: Path, console: Console) -> Summary:
    import eagle3compat
    from eagle3compat.kimi.extraction import Settings
    from eagle3compat.tiny import Variant, write_tiny_kimi
    from eagle3compat.tiny.vocabulary import FIRST_SPECIAL_TOKEN

    console.print(plan_table(eagle3compat.installed_plan()))
    # YaRN, which the real checkpoint has, happens to avoid a fault of vLLM's rotary kernel for the
    # CPU. Without it the demo shows what leaving out the shim cpu-rotary does.
    write_tiny_kimi(folder / "model", variant=Variant(yarn=False))
    rows = demo_rows(FIRST_SPECIAL_TOKEN)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return extract_with_progress(
        Settings(
            model=folder / "model",
            data=data,
            out=folder / "hidden_states",
            layers=LAYERS,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=TOKENS_A_STEP,
            dtype="float32",
        )
    )


def demo_rows(plain_tokens: int) -> list[dict[str, Any]]:
    """Conversations, and token ids that hurt an extraction that is not right.

    All of them go to the generator in one call: more requests than it schedules at once (32), more
    tokens than a step takes, prompts longer than a step, prompts of one token among them, and
    prompts that share a prefix of several cache blocks.

    Args:
        plain_tokens: token ids below it are text; those above are markers.
    """
    random = Random(0)

    def tokens(count: int) -> list[int]:
        return [random.randrange(plain_tokens) for _ in range(count)]

    rows = [{"messages": _messages(turns)} for turns in CONVERSATIONS]
    prefix = tokens(64)
    sequences = [
        *(tokens(TOKENS_A_STEP * factor + 5) for factor in (3, 1)),
        *(prefix + tokens(count) for count in (0, 1, 20, 40)),
        *(tokens(random.choice((1, 1, 2, 15, 16, 17, 33))) for _ in range(30)),
    ]
    masked = [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in sequences]
    return rows + masked


def _messages(turns: tuple[str, ...]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def _compare(folder: Path, summary: Summary) -> Comparison:
    """Compare the sample files, as they were written, with transformers."""
    from eagle3compat.kimi.storage import read_sample, sample_path
    from eagle3compat.reference import compare, reference_hidden_states

    job = summary.job
    samples = [read_sample(sample_path(job.folder.samples, i)) for i in range(len(job.samples))]
    expected = reference_hidden_states(
        folder / "model", [sample.input_ids for sample in job.samples], job.layers
    )
    return compare([sample["hidden_states"] for sample in samples], expected, job.layers)


def comparison_table(comparison: Comparison) -> Table:
    """The relative error of every layer of every sample; those beyond the tolerance are marked."""
    from rich import box
    from rich.table import Table

    from eagle3compat.reference import TOLERANCE

    title = f"relative error against transformers in float32 (at most {TOLERANCE:g}; ! is beyond)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in ("sample", "tokens", *(f"layer {layer}" for layer in comparison.layer_ids)):
        table.add_column(column, justify="right")
    for number, (count, errors) in enumerate(
        zip(comparison.token_counts, comparison.errors, strict=True)
    ):
        cells = (f"{error:.1e}{' ' if error <= TOLERANCE else '!'}" for error in errors)
        table.add_row(str(number), str(count), *cells)
    return table


def verdict(comparison: Comparison, off: tuple[str, ...]) -> str:
    """One line: whether the states are those of transformers, and which shims were off."""
    outcome = "equal" if comparison.agrees() else "DIFFERENT"
    compared = f"{len(comparison.errors)} samples x {len(comparison.layer_ids)} layers"
    shims = f"; shims turned off: {', '.join(off)}" if off else ""
    return f"{outcome}: {compared}, largest relative error {comparison.worst:.1e}{shims}"
