"""The command line: ``eagle3compat`` and ``verify-patches``.

A subcommand's module is imported when it is called, so that quick commands stay quick.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from eagle3compat.errors import Eagle3CompatError

# The base of typer's errors about arguments, whichever click it carries.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


@dataclass(frozen=True)
class _Subcommand:
    """Where a subcommand's function is."""

    module: str
    function: str

    def load_function(self) -> Callable[..., Any]:
        module = import_module(f"eagle3compat.commands.{self.module}")
        function: Callable[..., Any] = getattr(module, self.function)
        return function

    def load(self, name: str | None = None) -> typer.Typer:
        function = self.load_function()
        settings = getattr(sys.modules[function.__module__], "CONTEXT_SETTINGS", {})
        single = typer.Typer(add_completion=False)
        single.command(name, context_settings=settings)(function)
        return single


_SUBCOMMANDS = {
    "plan": _Subcommand("plan", "plan"),
    "extract": _Subcommand("extract", "extract"),
    "prepare": _Subcommand("prepare", "prepare"),
    "audit": _Subcommand("audit", "audit"),
    "vocab": _Subcommand("vocab", "vocab"),
    "train": _Subcommand("train", "train"),
    "report": _Subcommand("report", "report"),
    "run": _Subcommand("run", "run"),
    "acceptance": _Subcommand("acceptance", "acceptance"),
    "demo": _Subcommand("demo", "demo"),
    "tiny-kimi": _Subcommand("tiny_kimi", "tiny_kimi"),
    "verify-patches": _Subcommand("verify", "verify_patches"),
    "drift": _Subcommand("verify", "drift"),
    "bug-report": _Subcommand("verify", "bug_report"),
    "shims": _Subcommand("shims", "shims"),
    "matrix": _Subcommand("matrix", "matrix"),
}


class _LazyGroup(TyperGroup):
    """A group that knows its subcommands by name and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_SUBCOMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _SUBCOMMANDS:
            return None
        return typer.main.get_command(_SUBCOMMANDS[cmd_name].load(cmd_name))


@dataclass
class _Invocation:
    """What the options before the subcommand asked for."""

    traceback: bool = False


def _print_version(asked: bool) -> None:
    if asked:
        from eagle3compat.commands.version import version_lines

        for line in version_lines():
            typer.echo(line)
        raise typer.Exit(0)


def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show our version and the builds of both sides.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Makes speculators extract right hidden states on the vLLM you have, or says why it cannot.

    EAGLE3COMPAT_DISABLE, a list of shim ids with commas between, or "all", turns shims off.
    """
    context.obj.traceback = show_traceback


def main() -> NoReturn:
    """The ``eagle3compat`` command."""
    application = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False)
    application.callback()(_root)
    _start(application)


def verify_patches() -> NoReturn:
    """The ``verify-patches`` command, also a subcommand of ``eagle3compat``."""
    subcommand = _SUBCOMMANDS["verify-patches"]
    if sys.argv[1:]:
        _start(subcommand.load())
    # typer makes a pydantic adapter of each option, which takes a third of the whole check.
    _carry_out(lambda invocation: subcommand.load_function()(), _Invocation())


def _start(application: typer.Typer) -> NoReturn:
    """Parse the command line and run what it asks for."""
    _carry_out(
        lambda invocation: typer.main.get_command(application).main(
            standalone_mode=False, obj=invocation
        ),
        _Invocation(),
    )


def _carry_out(command: Callable[[_Invocation], Any], invocation: _Invocation) -> NoReturn:
    """Run a command, with one line on standard error for what goes wrong.

    Exits with 2 for bad input and refusals, 1 for other failures, else as the command asks.
    """
    try:
        outcome = command(invocation)
    except typer.Exit as asked:
        outcome = asked.exit_code
    except _UsageError as error:
        _fail(error.format_message(), 2, invocation)  # type: ignore[attr-defined]
    except Eagle3CompatError as error:
        _fail(str(error), 2, invocation)
    except typer.Abort:
        _fail("interrupted", 130, invocation)
    except Exception as error:  # noqa: BLE001 - the last resort of a command line
        hint = "" if invocation.traceback else " (eagle3compat --traceback … shows where)"
        _fail(f"{type(error).__name__}: {error}{hint}", 1, invocation)
    if callable(outcome):  # a script to run; what it raises is its own
        outcome()
    sys.exit(outcome if isinstance(outcome, int) else 0)


def _fail(message: str, code: int, invocation: _Invocation) -> NoReturn:
    if invocation.traceback:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
