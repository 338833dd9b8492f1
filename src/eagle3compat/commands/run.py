"""``eagle3compat run``: somebody's unedited script, with the plan applied to its process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from eagle3compat.commands.showing import shim_lines
from eagle3compat.errors import InputError

# Everything after the script belongs to the script, `--help` included.
CONTEXT_SETTINGS = {
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def run(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT|-m MODULE [ARGUMENTS]"),
    ] = None,
) -> Callable[[], None]:
    """Run a Python script or module unedited, with the plan applied.

    The script sees the argv, path and main module that python would give it, and its exit code is
    passed on. EAGLE3COMPAT_DISABLE turns off single shims, or all.
    """
    import eagle3compat

    if arguments in (["--help"], ["-h"]):
        typer.echo(context.get_help())
        raise typer.Exit(0)
    start = _prepare(arguments or [])
    for line in shim_lines(eagle3compat.apply()):
        typer.echo(f"eagle3compat: {line}", err=True)
    # Started by the caller, outside of the command line's own handling of exceptions.
    return start


def _prepare(arguments: list[str]) -> Callable[[], None]:
    match arguments:
        case ["-m", module, *rest]:
            return partial(_run_module, module, rest)
        case [script, *rest] if not script.startswith("-"):
            if not Path(script).exists():
                raise InputError(f"run: no such script: {script}")
            return partial(_run_script, script, rest)
        case [option, *_] if option != "-m":
            raise InputError(f"run: {option} is no option of run; options go after the script")
    raise InputError("run: expected a script, or -m and a module; see eagle3compat run --help")


def _run_script(script: str, arguments: list[str]) -> None:
    sys.argv[:] = [script, *arguments]
    # A folder or an archive puts itself on the path, as runpy documents.
    if Path(script).is_file():
        _set_first_path(str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _run_module(module: str, arguments: list[str]) -> None:
    sys.argv[:] = [module, *arguments]
    _set_first_path(str(Path.cwd()))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _set_first_path(folder: str) -> None:
    # In safe-path mode (Python 3.11+) the interpreter puts no folder of a script there.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
