"""The live and smoke levels: what the text said, asked of the live objects.

Everything runs in processes of its own, as a user's extraction would: one that applies and imports
the generator, one spawned from it that loads vLLM's plugins as a worker does, and for the smoke
level a real engine on a tiny Kimi whose states are compared with transformers in float32.
"""

from __future__ import annotations

import importlib
import inspect
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3compat.report import Check, Report, Verdict

if TYPE_CHECKING:
    from eagle3compat.facts import Facts

_LIVE_TIMEOUT = 600
_SMOKE_TIMEOUT = 1800
_WORKER_TIMEOUT = 300
_KINDS = {"variadic positional": "var-positional", "variadic keyword": "var-keyword"}


def check_live(facts: Facts, report: Report, smoke: bool = False) -> list[Check]:
    """Apply and import in a fresh process, and judge what is live there and in a worker.

    Args:
        facts: the facts that the static report was made from.
        report: the static report, whose symbols and shims are asked for.
        smoke: also run the engine.
    """
    symbols = sorted(
        {each.symbol for each in report.checks if each.takes and "()" not in each.symbol}
    )
    answers = _ask({"symbols": symbols, "smoke": smoke}, _SMOKE_TIMEOUT if smoke else _LIVE_TIMEOUT)
    if "error" in answers:
        return [_problem("live", "eagle3compat.apply", str(answers["error"]))]
    checks = [*_of_shims(answers), *_of_signatures(facts, answers["signatures"])]
    if smoke:
        checks.append(_of_smoke(answers["smoke"]))
    return checks


def _ask(request: dict[str, Any], timeout: int) -> dict[str, Any]:
    """Run the process that imports both sides; its answer comes in a file, apart from its logs."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request))
        command = [sys.executable, "-m", "eagle3compat.live", str(asked), str(answered)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"the process that imports both sides took more than {timeout} s"}
        if not answered.exists():
            lines = done.stderr.strip().splitlines() or ["no message"]
            return {"error": f"the process ended with {done.returncode}: {lines[-1]}"}
        answer: dict[str, Any] = json.loads(answered.read_text())
        return answer


def _of_shims(answers: dict[str, Any]) -> Iterator[Check]:
    for process in ("parent", "worker"):
        answer = answers[process]
        if "error" in answer:
            yield _problem(process, "eagle3compat.plugin", answer["error"])
            continue
        for shim in answer["expected"]:
            is_live = shim in answer["live"]
            yield Check(
                "live",
                Verdict.HOLDS if is_live else Verdict.BROKEN,
                f"{process} process",
                "",
                f"eagle3compat.shims.{shim.replace('-', '_')}",
                reason="its replacements are in place" if is_live else "not live after the imports",
                shim=shim,
                remedy="" if is_live else "Report it (eagle3compat bug-report).",
            )
        for place in answer["displaced"]:
            yield _problem(process, place, "somebody patched over our replacement")


def _of_signatures(facts: Facts, live: dict[str, Any]) -> Iterator[Check]:
    for symbol, answer in live.items():
        expected = facts.signature(symbol)
        if isinstance(answer, str):
            yield _problem("live object", symbol, answer)
        elif expected is not None:
            read = [[each.name, each.kind, each.required] for each in expected.parameters]
            same = read == answer
            yield Check(
                "live",
                Verdict.HOLDS if same else Verdict.CANNOT_TELL,
                "live object",
                "",
                symbol,
                facts.place(symbol),
                takes=str(expected),
                reason="as its text says" if same else f"the live object takes {_shown(answer)}",
                remedy="" if same else "Something replaced it at import. Report it (bug-report).",
            )


def _shown(parameters: list[Any]) -> str:
    return ", ".join(name if required else f"{name}=…" for name, _, required in parameters)


def _of_smoke(outcome: dict[str, Any]) -> Check:
    if "error" in outcome:
        return _problem("engine", "vllm", outcome["error"], "smoke")
    calls = "; ".join(
        f"{each['name']}: {each['result']} {each['detail']}".strip() for each in outcome["calls"]
    )
    reason = f"largest relative error {outcome['worst']:.2g} against transformers ({calls})"
    verdict = Verdict.HOLDS if outcome["right"] else Verdict.BROKEN
    remedy = "" if outcome["right"] else "Do not extract with this pair. Report it (bug-report)."
    return Check("smoke", verdict, "engine", "", "hidden states", reason=reason, remedy=remedy)


def _problem(site: str, symbol: str, reason: str, kind: str = "live") -> Check:
    return Check(
        kind,
        Verdict.BROKEN,
        site,
        "",
        symbol,
        reason=reason,
        remedy="Report it (eagle3compat bug-report).",
    )


# --- in the process of its own ------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """``python -m eagle3compat.live REQUEST ANSWER``: apply, import, look, answer."""
    request = json.loads(Path(arguments[0]).read_text())
    try:
        answer = _look(request)
    except Exception as error:  # noqa: BLE001 - whatever is raised is what the parent asks for
        answer = {"error": _one_line(error)}
    Path(arguments[1]).write_text(json.dumps(answer))
    return 0


def _look(request: dict[str, Any]) -> dict[str, Any]:
    import eagle3compat
    from eagle3compat.shim import GENERATOR, WORKER, shim

    plan = eagle3compat.apply()
    for module in (GENERATOR, WORKER):
        importlib.import_module(module)
    needed = [decision.shim.id for decision in plan.needed]
    answer = {
        "parent": _status([each for each in needed if shim(each).process.in_parent]),
        "worker": _ask_worker([each for each in needed if shim(each).process.in_worker]),
        "signatures": {symbol: _live_signature(symbol) for symbol in request["symbols"]},
    }
    if request["smoke"]:
        answer["smoke"] = _smoke()
    return answer


def _status(expected: list[str]) -> dict[str, Any]:
    import eagle3compat

    status = eagle3compat.status()
    return {"expected": expected, "live": list(status.live), "displaced": list(status.displaced)}


def _ask_worker(expected: list[str]) -> dict[str, Any]:
    """What is live in a spawned process that loads vLLM's plugins first, as its workers do."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_be_worker, args=(theirs, expected))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_WORKER_TIMEOUT):
            return {"error": f"a worker process did not answer within {_WORKER_TIMEOUT} s"}
        answer: dict[str, Any] = ours.recv()
    except EOFError:
        return {"error": "a worker process ended without an answer"}
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
    return answer


def _be_worker(connection: Connection, expected: list[str]) -> None:
    try:
        plugins = importlib.import_module("vllm.plugins")
        plugins.load_general_plugins()
        from eagle3compat.shim import WORKER

        importlib.import_module(WORKER)
        answer = _status(expected)
        if not answer["live"] and expected:
            answer = {
                "error": "vLLM's plugins did not bring eagle3compat into a worker. Install it into "
                "this environment, so that its entry point is found."
            }
    except Exception as error:  # noqa: BLE001 - whatever is raised is what the parent asks for
        answer = {"error": _one_line(error)}
    connection.send(answer)


def _live_signature(symbol: str) -> list[list[Any]] | str | None:
    """The parameters of a live object without self; a text says why there are none."""
    parts = symbol.split(".")
    try:
        found, rest = _import_longest(parts)
        owner: Any = None
        for name in rest:
            owner, found = found, getattr(found, name)
        parameters = list(inspect.signature(found).parameters.values())
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return _one_line(error)
    is_method = inspect.isclass(owner) and inspect.isfunction(found)
    is_static = is_method and isinstance(inspect.getattr_static(owner, parts[-1]), staticmethod)
    if is_method and not is_static:
        parameters = parameters[1:]
    return [
        [
            each.name,
            _KINDS.get(each.kind.description, each.kind.description),
            each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD),
        ]
        for each in parameters
    ]


def _import_longest(parts: list[str]) -> tuple[Any, list[str]]:
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        try:
            return importlib.import_module(name), parts[count:]
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise  # The module is there, and something that it imports is not.
    raise ModuleNotFoundError(f"no module {parts[0]}")


def _smoke() -> dict[str, Any]:
    from eagle3compat.suite import run_suite, smoke_calls
    from eagle3compat.tiny import write_tiny_kimi

    with tempfile.TemporaryDirectory() as folder:
        model, control = Path(folder, "tiny-kimi"), Path(folder, "control")
        try:
            write_tiny_kimi(model)
            write_tiny_kimi(control, seed=1)
            return run_suite(model, smoke_calls(), control=control).to_dict()
        except Exception as error:  # noqa: BLE001 - whatever is raised is the outcome
            return {"error": _one_line(error)}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:600]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
