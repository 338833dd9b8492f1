"""Every demand that the consumer's text makes of its providers, judged against their text.

This is the check that needs no shim and no list: it finds the break that nobody has written down.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from eagle3compat.binding import Verdict as BindVerdict
from eagle3compat.binding import bind
from eagle3compat.facts import Facts
from eagle3compat.records import (
    Attribute,
    Call,
    Class,
    Function,
    ImportedName,
    ModuleFacts,
    Signature,
    Unknown,
    Use,
)
from eagle3compat.report import Check, Unresolved, Verdict

PROVIDERS = ("vllm", "transformers", "torch")
CONSUMER_PARTS = ("data_generation", "train", "models", "utils")
_PUBLIC_TORCH = ("torch.nn.functional", "torch.nn.Module", "torch.utils.data")
_UPGRADE = "No shim repairs it: use a build in which it is there, or report it (bug-report)."
_READ = "Read both places; --level live asks the live objects."


def consumer_modules(facts: Facts) -> list[str]:
    """The consumer's modules whose demands are judged: data generation, training, models."""
    source = facts.sources["speculators"]
    wanted = [f"speculators.{part}" for part in CONSUMER_PARTS]
    return [
        module
        for module in source.modules()
        if any(module == part or module.startswith(f"{part}.") for part in wanted)
    ]


class Demands:
    """Judges the demands of the consumer's modules.

    Args:
        facts: facts of the consumer and of its providers.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._gone: set[str] = set()
        self._reported: set[tuple[str, str]] = set()
        self.unresolved: list[Unresolved] = []

    def judge(self, modules: Iterable[str]) -> Iterator[Check]:
        """One check for each demand that can be followed; the others go to ``unresolved``."""
        for module in modules:
            uses = self._facts.uses(module)
            for name in uses.imports:
                if is_judged(name.target):
                    yield from self._import(module, name)
            corners = {each.target for each in uses.imports if is_judged(each.target)}
            for call in uses.calls:
                if self._concerns(call.target, corners):
                    yield from self._call(module, call)
            for use in uses.attributes:
                if self._concerns(use.target, corners):
                    yield from self._attribute(module, use)

    def _concerns(self, target: str, corners: set[str]) -> bool:
        """Whether a name is a provider's, or of an own object that leads to a provider's."""
        if target.startswith("torch."):
            return any(target == each or target.startswith(f"{each}.") for each in corners)
        if not target.startswith("speculators."):
            return is_judged(target)
        first, made, _ = target.partition("()")
        maker = self._facts.resolve(first) if made else None
        return isinstance(maker, Function) and is_judged(maker.returns or "")

    def _import(self, module: str, name: ImportedName) -> Iterator[Check]:
        found = self._facts.resolve(name.target)
        site = self._site(module, name.line)
        if isinstance(found, Unknown) and self._facts.lacks_module(_parent(name.target)):
            found = None
        if isinstance(found, Unknown):
            if found.exists or not self._has_source(name.target):
                return
            yield self._doubt("import", site, name.in_function, name.target, found.reason)
        elif found is None:
            self._gone.add(name.target)
            reason = self._absence(name.target)
            if name.guarded:
                reason = f"{reason}; the import is guarded"
                self.unresolved.append(Unresolved(site, name.target, reason))
            else:
                yield self._broken("import", site, name.in_function, name.target, reason)
        else:
            place = self._facts.place(name.target)
            yield Check("import", Verdict.HOLDS, site, name.in_function, name.target, place)

    def _call(self, module: str, call: Call) -> Iterator[Check]:
        if self._follows_from_import(call.target):
            return
        site = self._site(module, call.line)
        found = self._facts.look_up_signature(call.target)
        if isinstance(found, Signature):
            target = self._facts.resolve(call.target)
            if isinstance(target, Function) and _is_unbound(call, target):
                reason = f"{target.name} is called through its class"
                self.unresolved.append(Unresolved(site, call.target, reason))
            else:
                yield from self._bound(call, site, found)
        elif isinstance(found, Unknown):
            if self._is_followable(call.target):
                yield self._doubt("call", site, call.in_function, call.target, found.reason)
            else:
                self.unresolved.append(Unresolved(site, call.target, found.reason))
        elif self._is_providers(call.target):
            reason = self._absence(call.target)
            yield self._broken("call", site, call.in_function, call.target, reason)

    def _bound(self, call: Call, site: str, signature: Signature) -> Iterator[Check]:
        result = bind(signature, call)
        if result.verdict is BindVerdict.CANNOT_TELL:
            self.unresolved.append(Unresolved(site, call.target, result.problem))
            return
        verdict = Verdict.HOLDS if result.binds else Verdict.BROKEN
        reason = result.problem
        if verdict is Verdict.HOLDS and signature.is_async and not call.awaited:
            verdict, reason = Verdict.BROKEN, "is a coroutine function here, and is not awaited"
        elif verdict is Verdict.HOLDS and (lacking := self._lacking(call.target)):
            verdict, reason = Verdict.BROKEN, f"is abstract: it does not define {lacking}"
        elif verdict is Verdict.HOLDS and call.awaited and not signature.is_async:
            verdict, reason = Verdict.CANNOT_TELL, "is awaited, and is no coroutine function here"
        yield Check(
            "call",
            verdict,
            site,
            call.in_function,
            call.target,
            self._facts.place(call.target),
            passes_of(call),
            str(signature),
            reason=reason,
            remedy={Verdict.BROKEN: _UPGRADE, Verdict.CANNOT_TELL: _READ}.get(verdict, ""),
        )

    def _lacking(self, target: str) -> str:
        """The abstract methods that keep a class from being instantiated."""
        found = self._facts.resolve(target)
        return ", ".join(self._facts.abstract_methods(found)) if isinstance(found, Class) else ""

    def _attribute(self, module: str, use: Use) -> Iterator[Check]:
        if use.guarded or self._follows_from_import(use.target):
            return
        found = self._facts.resolve(use.target)
        site = self._site(module, use.line)
        if isinstance(found, Unknown):
            if not found.exists:
                self.unresolved.append(Unresolved(site, use.target, found.reason))
        elif found is None:
            if self._is_providers(use.target):
                reason = self._absence(use.target)
                yield self._broken("attribute", site, use.in_function, use.target, reason)
        elif not isinstance(found, ModuleFacts) and _is_worth_listing(found, use):
            place = self._facts.place(use.target)
            yield Check("attribute", Verdict.HOLDS, site, use.in_function, use.target, place)

    def _is_providers(self, dotted: str) -> bool:
        """Whether an absent name is missing from a provider's object, not from our reading."""
        return is_judged(self._facts.absent_from(dotted)[0])

    def _is_followable(self, dotted: str) -> bool:
        """Whether the text should have told: a name of a provider's whose source is there."""
        return "()" not in dotted and dotted.startswith("vllm.") and self._has_source(dotted)

    def _has_source(self, dotted: str) -> bool:
        return self._facts.source_of(dotted) is not None

    def _follows_from_import(self, target: str) -> bool:
        parts = target.replace("()", "").split(".")
        return any(".".join(parts[:count]) in self._gone for count in range(2, len(parts) + 1))

    def _absence(self, dotted: str) -> str:
        if "()" not in dotted and self._facts.lacks_module(_parent(dotted)):
            return f"there is no module {_parent(dotted)}"
        owner, part = self._facts.absent_from(dotted)
        found = self._facts.resolve(owner)
        kind = "package" if isinstance(found, ModuleFacts) and found.is_package else "module"
        kind = kind if isinstance(found, ModuleFacts) else "class"
        moved = self._moved_to(owner, part) if isinstance(found, ModuleFacts) else None
        hint = f"; it is in {moved}" if moved else ""
        return f"{kind} {owner} has no {part}{hint}"

    def _moved_to(self, owner: str, name: str) -> str | None:
        """Where a name is defined now, looked for in the modules nearby."""
        source = self._facts.source_of(owner)
        if source is None:
            return None
        nearby = owner.rpartition(".")[0] or owner
        needles = (f"class {name}(", f"class {name}:", f"def {name}(", f"\n{name} = ")
        for module in source.modules():
            if module != owner and module.startswith(nearby):
                text = self._facts.source_text(module) or ""
                if any(needle in text for needle in needles):
                    return module
        return None

    def _site(self, module: str, line: int) -> str:
        return f"{self._facts.location(module)}:{line}"

    def _broken(self, kind: str, site: str, within: str, symbol: str, reason: str) -> Check:
        return Check(kind, Verdict.BROKEN, site, within, symbol, reason=reason, remedy=_UPGRADE)

    def _doubt(self, kind: str, site: str, within: str, symbol: str, reason: str) -> Check:
        return Check(kind, Verdict.CANNOT_TELL, site, within, symbol, reason=reason, remedy=_READ)


def is_judged(dotted: str) -> bool:
    """Whether a name is a provider's: all of vLLM and transformers, and torch's private corners."""
    top, _, rest = dotted.partition(".")
    if top in ("vllm", "transformers"):
        return True
    if top != "torch" or any(dotted.startswith(public) for public in _PUBLIC_TORCH):
        return False
    parts = rest.split(".")
    return any(part.startswith("_") for part in parts) or len(parts) > 2


def _parent(dotted: str) -> str:
    return dotted.rpartition(".")[0]


def passes_of(call: Call) -> str:
    """What a call passes, as it could be written: ``(…, block_size=…)``."""
    words = ["…"] * call.positional
    words += ["*…"] * call.star
    words += [f"{keyword}=…" for keyword in call.keywords]
    words += ["**…"] * call.double_star
    return f"({', '.join(words)})"


def relative_site(site: str, root: Path) -> str:
    """A call site without the folder that holds the package."""
    return site.removeprefix(f"{root}/").removeprefix(f"{root}!")


def _is_unbound(call: Call, target: Function | Class) -> bool:
    """Whether a method is called through its class, so that ``self`` is among the arguments."""
    if not isinstance(target, Function) or target.role != "method" or call.on_instance:
        return False
    return "()" not in call.target


def _is_worth_listing(found: Function | Class | Attribute, use: Use) -> bool:
    return is_judged(found.name) and not use.target.endswith("()")
