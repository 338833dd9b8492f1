"""``eagle3compat run``: somebody's unedited script, with the plan applied to its process."""

from __future__ import annotations

import builtins
import runpy
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
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
            if not Path(script).is_file():
                raise InputError(f"run: {script} is no script; expected a Python file, or -m")
            return partial(_run_script, script, rest)
        case [option, *_] if option != "-m":
            raise InputError(f"run: {option} is no option of run; options go after the script")
    raise InputError("run: expected a script, or -m and a module; see eagle3compat run --help")


def _run_script(script: str, arguments: list[str]) -> None:
    """As the interpreter does it; ``runpy.run_path`` differs in argv and in ``__main__``.

    The main module stays after the end, for threads and exit handlers, and tells processes that the
    script spawns by ``__file__`` what to import again.
    """
    path = str(Path(script).absolute())
    loader = SourceFileLoader("__main__", path)
    main = ModuleType("__main__")
    main.__file__, main.__loader__, main.__package__ = path, loader, None
    vars(main)["__builtins__"] = builtins
    sys.argv[:] = [script, *arguments]
    _set_first_path(str(Path(script).resolve().parent))
    sys.modules["__main__"] = main
    code = loader.source_to_code(loader.get_data(path), path)
    exec(code, vars(main))  # noqa: S102 - the script that the user named


def _run_module(module: str, arguments: list[str]) -> None:
    sys.argv[:] = [module, *arguments]
    _set_first_path(str(Path.cwd()))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _set_first_path(folder: str) -> None:
    # In safe-path mode (Python 3.11+) the interpreter puts no folder of a script there.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
