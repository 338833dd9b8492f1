"""``eagle3compat tiny-kimi``: writes the tiny Kimi-K2.5 checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tiny_kimi(
    directory: Annotated[
        Path, typer.Argument(help="Folder to write; it must not exist, or be empty.")
    ],
    seed: Annotated[int, typer.Option(help="Which random weights, 0 or more.")] = 0,
    mla_gpu: Annotated[
        bool, typer.Option("--mla-gpu", help="Head dimensions that MLA kernels on a GPU want.")
    ] = False,
    text_only: Annotated[
        bool,
        typer.Option("--text-only", help="A plain DeepseekV3ForCausalLM, for vLLM before 0.15.1."),
    ] = False,
    yarn: Annotated[
        bool, typer.Option("--yarn", help="Scaled rotary embedding, as the real checkpoint has.")
    ] = False,
    learnable: Annotated[
        bool,
        typer.Option(
            "--learnable", help="Text that a draft learns from the right hidden states alone."
        ),
    ] = False,
) -> None:
    """Write a tiny random Kimi-K2.5 that real vLLM loads: the same bytes for the same options."""
    from eagle3compat.tiny import Variant, write_tiny_kimi

    variant = Variant(mla_gpu=mla_gpu, text_only=text_only, yarn=yarn, learnable=learnable)
    write_tiny_kimi(directory, seed=seed, variant=variant)
    size = sum(path.stat().st_size for path in directory.iterdir())
    kind = "DeepSeek-V3 language model" if text_only else "Kimi-K2.5"
    typer.echo(f"Tiny {kind}, seed {seed}: {directory} ({size / 1e6:.1f} MB)")
