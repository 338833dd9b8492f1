"""What the source text of a consumer and its providers says, asked one dotted name at a time.

Every answer is one of three: what the name is, that it is not there (None), or that the text cannot
tell (``Unknown``). Modules are read when they are first asked for, and kept in the user's cache.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from eagle3compat.binding import Bind, Verdict, bind
from eagle3compat.cache import FactsCache
from eagle3compat.records import (
    KEYWORD_ONLY,
    POSITIONAL_OR_KEYWORD,
    VAR_POSITIONAL,
    Attribute,
    Binding,
    Bound,
    Call,
    Class,
    Decorator,
    Field,
    Function,
    Import,
    ModuleFacts,
    Parameter,
    Signature,
    Unknown,
    Uses,
    from_plain,
    to_plain,
)
from eagle3compat.sources import Source

Definition: TypeAlias = Function | Class | Attribute | ModuleFacts
Found: TypeAlias = Definition | Unknown | None

_STANDARD_MODULES = {"builtins", "abc", "enum", "typing", "collections", "collections.abc"}
_WITHOUT_CONSTRUCTOR = {
    "builtins.object",
    "abc.ABC",
    "typing.Generic",
    "typing.Protocol",
    "typing_extensions.Protocol",
}
_STRUCT = "msgspec.Struct"
# Its __getattr__ makes every answer doubtful: reading torch for it would be in vain.
_MODULE_OF_TORCH = {"torch.nn.Module", "torch.nn.modules.module.Module"}
_DATACLASS = {"dataclasses.dataclass", "pydantic.dataclasses.dataclass"}
_TRANSFORM = {"typing.dataclass_transform", "typing_extensions.dataclass_transform"}
_HARMLESS_DECORATORS = {
    "builtins.staticmethod",
    "builtins.classmethod",
    "abc.abstractmethod",
    "contextlib.contextmanager",
    "enum.unique",
    "functools.cache",
    "functools.lru_cache",
    "functools.total_ordering",
    "torch.no_grad",
    "torch.inference_mode",
    "typing.final",
    "typing.override",
    "typing.runtime_checkable",
    "typing_extensions.deprecated",
    "typing_extensions.final",
    "typing_extensions.override",
    "typing_extensions.runtime_checkable",
    "warnings.deprecated",
}


class Facts:
    """Facts of one consumer and its providers.

    Args:
        sources: one source a package; the package's name is taken from its build.
        cache: where facts are kept between runs; the user's cache folder by default.
    """

    def __init__(self, *sources: Source, cache: FactsCache | None = None) -> None:
        self.sources: dict[str, Source] = {each.build.package: each for each in sources}
        self._cache = FactsCache.of_user() if cache is None else cache
        self._modules: dict[str, ModuleFacts | None] = {}
        self._uses: dict[str, Uses] = {}
        self._texts: dict[str, str | None] = {}
        self._found: dict[str, Found] = {}
        self._mro: dict[str, list[Class | str | Unknown]] = {}
        self._self: dict[str, frozenset[str] | None] = {}
        self._stars_open: set[str] = set()

    # --- modules -----------------------------------------------------------------------------

    def source_of(self, dotted: str) -> Source | None:
        """The source of the package that a dotted name starts with."""
        return self.sources.get(dotted.partition(".")[0])

    def source_text(self, module: str) -> str | None:
        """The text of a module, None where there is none."""
        if module not in self._texts:
            source = self.source_of(module)
            self._texts[module] = source.text(module) if source else None
        return self._texts[module]

    def location(self, module: str) -> str:
        """A path to show for a module."""
        source = self.source_of(module)
        return source.location(module) if source else module

    def module(self, name: str) -> ModuleFacts | None:
        """What a module binds; None where there is no such module with text."""
        if name not in self._modules:
            self._modules[name] = self._read_module(name)
        return self._modules[name]

    def uses(self, module: str) -> Uses:
        """What a module calls, reads and imports of others."""
        if module not in self._uses:
            self._uses[module] = self._read_uses(module)
        return self._uses[module]

    def calls(self, module: str, target: str | None = None) -> tuple[Call, ...]:
        """The calls in a module whose target is known, all or those of one target.

        Args:
            module: dotted name of the module.
            target: dotted name as the module imports it, or where that name is defined.
        """
        calls = self.uses(module).calls
        if target is None:
            return calls
        return tuple(each for each in calls if self._is_same(each.target, target))

    def _is_same(self, name: str, target: str) -> bool:
        if name == target:
            return True
        ends_alike = name.rpartition(".")[2] == target.rpartition(".")[2]
        if not ends_alike or name.partition(".")[0] != target.partition(".")[0]:
            return False
        first, second = self.resolve(name), self.resolve(target)
        return (
            isinstance(first, (Function, Class))
            and isinstance(second, (Function, Class))
            and first.name == second.name
        )

    def _read_module(self, name: str) -> ModuleFacts | None:
        source = self.source_of(name)
        if source is None:
            return None
        fingerprint = source.fingerprint(name)
        kept = self._from_cache(source, f"module {name}", fingerprint)
        if isinstance(kept, ModuleFacts):
            return kept
        text = self.source_text(name)
        if text is None:
            if source.is_package(name):
                return ModuleFacts(name, is_package=True, bindings={})
            if source.is_opaque(name):
                return ModuleFacts(name, problem="compiled code, which has no text")
            return None
        from eagle3compat.reading import read_module

        facts = read_module(name, source.is_package(name), text)
        self._keep(source, f"module {name}", fingerprint, facts)
        return facts

    def _read_uses(self, name: str) -> Uses:
        source = self.source_of(name)
        if source is None:
            return Uses()
        fingerprint = source.fingerprint(name)
        kept = self._from_cache(source, f"uses {name}", fingerprint)
        if isinstance(kept, Uses):
            return kept
        text = self.source_text(name)
        if text is None:
            return Uses()
        from eagle3compat.calls import read_uses

        uses = read_uses(name, source.is_package(name), text)
        self._keep(source, f"uses {name}", fingerprint, uses)
        return uses

    def digest(self, module: str, qualname: str) -> str | None:
        """The digest of a function's text (`probes.digest`), kept between runs.

        Args:
            module: dotted name of the module.
            qualname: such as ``Class.method``.

        Returns:
            None where the module has no text, or defines no such function.
        """
        source = self.source_of(module)
        if source is None:
            return None
        place = str(source.build.package_dir), f"digest {module} {qualname}"
        kept = self._cache.get(*place, source.fingerprint(module))
        if not isinstance(kept, str):
            from eagle3compat.probes import digest

            text = self.source_text(module)
            kept = (text is not None and digest(text, qualname)) or ""
            self._cache.put(*place, source.fingerprint(module), kept)
        return kept or None

    def save(self) -> None:
        """Keep what was read for the next run, where the user's cache folder can be written."""
        self._cache.save()

    def _from_cache(self, source: Source, name: str, fingerprint: str | None) -> Any:
        plain = self._cache.get(str(source.build.package_dir), name, fingerprint)
        try:
            return from_plain(plain)
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return None  # A damaged file; what it held is read again.

    def _keep(self, source: Source, name: str, fingerprint: str | None, facts: Any) -> None:
        self._cache.put(str(source.build.package_dir), name, fingerprint, to_plain(facts))

    # --- names -------------------------------------------------------------------------------

    def resolve(self, dotted: str) -> Found:
        """What a dotted name stands for, through imports, aliases, bases and annotations.

        Args:
            dotted: such as ``vllm.config.SchedulerConfig``; ``()`` in it stands for the result of a
                call, known where the return annotation names a class.

        Returns:
            The definition, None where the name is certainly absent, or Unknown.
        """
        if dotted not in self._found:
            self._found[dotted] = Unknown(f"{dotted} is imported in a circle")
            self._found[dotted] = self._resolve(dotted)
        return self._found[dotted]

    def _resolve(self, dotted: str) -> Found:
        top = dotted.partition(".")[0]
        if top not in self.sources:
            return Unknown(f"the source of {top} was not given")
        start = self._module_within(dotted)
        found: Found = self.module(start)
        rest = dotted[len(start) + 1 :].split(".") if dotted != start else []
        for part in rest:
            name = part.rstrip("()")
            found = self._step(found, name)
            for _ in range(part.count("()")):
                found = self._result(found)
            if found is None or isinstance(found, Unknown):
                return found
        return found

    def _module_within(self, dotted: str) -> str:
        """The longest module that a name starts with, its last part left out.

        ``from pkg.module import name`` looks in that module whatever the package binds; the last
        part may be bound by the package itself, which then comes first.
        """
        found = dotted.partition(".")[0]
        for part in dotted.split(".")[1:-1]:
            longer = f"{found}.{part}"
            if longer not in self._modules and not self._exists(longer):
                break
            if self._modules.get(longer, True) is None:
                break
            found = longer
        return found

    def _exists(self, module: str) -> bool:
        source = self.source_of(module)
        return source is not None and (source.has_text(module) or source.is_opaque(module))

    def _step(self, owner: Found, name: str) -> Found:
        if isinstance(owner, ModuleFacts):
            return self._in_module(owner, name)
        if isinstance(owner, Class):
            return self._in_class(owner, name)
        if isinstance(owner, (Attribute, Function)):
            is_value = isinstance(owner, Attribute) or owner.role == "property"
            class_ = owner.type if isinstance(owner, Attribute) else owner.returns
            if not is_value or class_ is None:
                return Unknown(f"the class of {owner.name} is not annotated")
            inner = self.resolve(class_)
            if isinstance(inner, Class):
                return self._in_class(inner, name)
            return Unknown(f"the class of {owner.name} cannot be followed")
        return owner

    def _result(self, callee: Found) -> Found:
        """What a call yields: an object of the class called, or of the class that is annotated."""
        if isinstance(callee, Class) or callee is None or isinstance(callee, Unknown):
            return callee
        returns = callee.returns if isinstance(callee, Function) else None
        if returns is None:
            return Unknown(f"what {callee.name} returns is not annotated with one class")
        class_ = self.resolve(returns)
        if isinstance(class_, Class):
            return class_
        return Unknown(f"what {callee.name} returns cannot be followed")

    def _in_module(self, module: ModuleFacts, name: str) -> Found:
        if module.problem:
            return Unknown(f"{module.name}: {module.problem}")
        bound = (module.bindings or {}).get(name)
        if bound is not None:
            return self._settle(module.name, name, bound)
        doubt: Unknown | None = None
        for star in reversed(module.star_imports):
            found = self._through_star(star, name)
            if isinstance(found, Unknown):
                doubt = doubt or found
            elif found is not None:
                return found
        submodule = self.module(f"{module.name}.{name}") if module.is_package else None
        if submodule is not None:
            return submodule
        if module.is_lazy:
            return self._lazily(module, name)
        if doubt is None and module.is_dynamic:
            doubt = Unknown(f"{module.name} binds names that its text does not spell out")
        return doubt

    def _through_star(self, star: str, name: str) -> Found:
        if star.partition(".")[0] not in self.sources:
            return Unknown(f"{star} is imported by *, and its source was not given")
        if star not in self._modules and not self._may_bind(star, name):
            return None
        module = self.module(star)
        if module is None:
            return Unknown(f"{star} is imported by *, and is not there")
        if module.exports is None and name.startswith("_"):
            return None
        if module.exports is not None and name not in module.exports:
            return None
        if star in self._stars_open:
            return None
        self._stars_open.add(star)
        try:
            return self._in_module(module, name)
        finally:
            self._stars_open.discard(star)

    def _may_bind(self, module: str, name: str) -> bool:
        """A glance at the text, to spare the reading of modules that only might bind a name."""
        text = self.source_text(module)
        return text is None or name in text or "import *" in text or "globals()" in text

    def _lazily(self, module: ModuleFacts, name: str) -> Found:
        target = (module.lazy_names or {}).get(name)
        if target is not None:
            found = self.resolve(target)
            return Unknown(f"{module.name} yields {name} lazily") if found is None else found
        for star in sorted(module.lazy_stars, key=lambda star: _likelihood(star, name)):
            found = self._through_star(star, name)
            if found is not None and not isinstance(found, Unknown):
                return found
        return Unknown(f"{module.name} yields names lazily; {name} is not among those it lists")

    def _settle(self, owner: str, name: str, bound: Bound) -> Found:
        """The one thing that a name is bound to, if it is one thing."""
        found = [self._follow(owner, name, each) for each in bound.alternatives]
        distinct: list[Found] = []
        for each in found:
            if not any(_is_alike(each, other) for other in distinct):
                distinct.append(each)
        lines = ", ".join(str(each.line) for each in bound.alternatives)
        if not bound.definitely:
            return Unknown(f"{owner} binds {name} only under a condition (line {lines})")
        if len(distinct) == 1:
            return distinct[0]
        if all(isinstance(each, Attribute) for each in distinct):
            return Attribute(f"{owner}.{name}", bound.alternatives[-1].line)
        return Unknown(
            f"{owner} binds {name} to different things under conditions (lines {lines})",
            exists=True,
        )

    def _follow(self, owner: str, name: str, binding: Binding) -> Found:
        if isinstance(binding, Import):
            if binding.target == f"{owner}.{name}":  # ``from . import name``: the submodule.
                return self.module(binding.target)
            found = self.resolve(binding.target)
            if binding.target.partition(".")[0] not in self.sources:
                return Unknown(f"{binding.target} is of a package whose source was not given", True)
            if found is None:
                return Unknown(
                    f"{binding.target} is imported in line {binding.line}, and not there"
                )
            return found
        if isinstance(binding, Attribute) and binding.alias is not None:
            found = self.resolve(binding.alias)
            if found is not None and not isinstance(found, Unknown):
                return found
            return replace(binding, alias=None)
        return binding

    def absent_from(self, dotted: str) -> tuple[str, str]:
        """Of an absent name: what is there, and the first part that is not in it."""
        parts = dotted.split(".")
        for count in range(len(parts) - 1, 0, -1):
            owner = self.resolve(".".join(parts[:count]))
            if isinstance(owner, (Function, Class, Attribute, ModuleFacts)):
                return owner.name, parts[count]
        return parts[0], ".".join(parts[1:])

    def lacks_module(self, module: str) -> bool:
        """Whether ``from module import …`` certainly fails for want of the module.

        A lazy package may put modules into ``sys.modules`` that are no files; it then names them.
        """
        if self.source_of(module) is None:
            return False
        parent, _, name = module.rpartition(".")
        if not parent:
            return False
        found = self.module(parent)
        if found is None:
            return self.lacks_module(parent)
        return self.module(module) is None and name not in (self.source_text(parent) or "")

    def place(self, dotted: str) -> str | None:
        """``path:line`` of the definition of a name, where it is known."""
        found = self.resolve(dotted)
        if isinstance(found, ModuleFacts):
            return self.location(found.name)
        if not isinstance(found, (Function, Class, Attribute)) or not found.line:
            return None
        owner = self._module_of(found.name.rpartition(".")[0])
        return f"{self.location(owner)}:{found.line}" if owner else None

    # --- classes -----------------------------------------------------------------------------

    def _in_class(self, class_: Class, name: str) -> Found:
        own = class_.members.get(name)
        if own is not None:
            return self._settle(class_.name, name, own)
        set_on_self = self._set_on_self(class_)
        if set_on_self is not None and name in set_on_self:
            return Attribute(f"{class_.name}.{name}", class_.line)
        order = self.linearize(class_)
        is_dynamic = False
        for entry in order:
            if isinstance(entry, Unknown):
                return entry
            if isinstance(entry, str):
                if _standard_has(entry, name):
                    return Attribute(f"{entry}.{name}", 0)
                continue
            bound = entry.members.get(name)
            if bound is not None:
                return self._settle(entry.name, name, bound)
            set_on_self = self._set_on_self(entry)
            if set_on_self is None:
                is_dynamic = True
            elif name in set_on_self:
                return Attribute(f"{entry.name}.{name}", entry.line)
        if is_dynamic:
            return Unknown(f"{class_.name} has attributes that its text does not spell out")
        return None

    def _set_on_self(self, class_: Class) -> frozenset[str] | None:
        if class_.name not in self._self:
            from eagle3compat.reading import attributes_set_on_self

            lines = (self.source_text(self._module_of(class_.name)) or "").split("\n")
            text = "\n".join(lines[class_.line - 1 : class_.end_line])
            self._self[class_.name] = attributes_set_on_self(text)
        return self._self[class_.name]

    def _module_of(self, dotted: str) -> str:
        """The module that holds a definition, by its dotted name."""
        while dotted and self.module(dotted) is None:
            dotted = dotted.rpartition(".")[0]
        return dotted

    def linearize(self, class_: Class) -> list[Class | str | Unknown]:
        """The class and its bases in the order in which Python looks for attributes.

        Bases from the standard library appear by name; one that cannot be followed as Unknown.
        """
        if class_.name not in self._mro:
            self._mro[class_.name] = [Unknown(f"the bases of {class_.name} form a circle")]
            self._mro[class_.name] = self._linearize(class_)
        return self._mro[class_.name]

    def _linearize(self, class_: Class) -> list[Class | str | Unknown]:
        entries: dict[str, Class | str | Unknown] = {class_.name: class_}
        sequences: list[list[str]] = []
        bases: list[str] = []
        for base in class_.bases:
            order = self._order_of_base(class_, base)
            keys = [_key(each) for each in order]
            entries.update(zip(keys, order, strict=True))
            sequences.append(keys)
            bases.append(keys[0])
        merged = _merge([*sequences, bases])
        if merged is None:
            return [class_, Unknown(f"the bases of {class_.name} have no consistent order")]
        return [class_, *(entries[key] for key in merged)]

    def _order_of_base(self, class_: Class, base: str) -> list[Class | str | Unknown]:
        if base in _MODULE_OF_TORCH:
            return [Unknown(f"{base} finds attributes by itself")]
        if base in _WITHOUT_CONSTRUCTOR or base == _STRUCT or _standard_class(base) is not None:
            return [base]
        found = self.resolve(base)
        if isinstance(found, Class):
            return self.linearize(found)
        reason = found.reason if isinstance(found, Unknown) else f"{base} is not there"
        return [Unknown(f"a base of {class_.name} cannot be followed: {reason}")]

    def has_member(self, class_dotted: str, name: str) -> bool | None:
        """Whether objects of a class have an attribute; None where the text cannot tell."""
        class_ = self.resolve(class_dotted)
        if not isinstance(class_, Class):
            return None
        found = self._in_class(class_, name)
        if isinstance(found, Unknown):
            return True if found.exists else None
        return found is not None

    # --- signatures --------------------------------------------------------------------------

    def signature(self, dotted: str) -> Signature | None:
        """What a call of a name takes, without self; None where it is absent or cannot be told."""
        found = self.look_up_signature(dotted)
        return found if isinstance(found, Signature) else None

    def look_up_signature(self, dotted: str) -> Signature | Unknown | None:
        """As ``signature``, telling an absent name (None) from one that cannot be told."""
        found = self.resolve(dotted)
        if found is None or isinstance(found, Unknown):
            return found
        if isinstance(found, Class):
            return self.constructor(found)
        if isinstance(found, Function):
            return self._of_function(found)
        return Unknown(f"{found.name} is not defined as a function or class")

    def _of_function(self, function: Function) -> Signature | Unknown:
        if function.role == "property":
            return Unknown(f"{function.name} is a property")
        for decorator in function.decorators:
            if not self._keeps_signature(decorator):
                return Unknown(f"{function.name} is decorated with {decorator.name}")
        parameters = function.parameters
        if function.role in ("method", "class method"):
            if not parameters:
                return Unknown(f"{function.name} takes no self")
            if parameters[0].kind != VAR_POSITIONAL:
                parameters = parameters[1:]
        return Signature(parameters, function.is_async)

    def _keeps_signature(self, decorator: Decorator) -> bool:
        if decorator.name in _HARMLESS_DECORATORS:
            return True
        found = self.resolve(decorator.name)
        return isinstance(found, Function) and (found.returns_its_argument or found.wraps)

    def constructor(self, class_: Class) -> Signature | Unknown:
        """What making an object of a class takes: ``__init__`` or the fields, following bases."""
        order = self.linearize(class_)
        for decorator in class_.decorators:
            if self._dataclass_options(decorator) is None and not self._keeps_class(decorator):
                return Unknown(f"{class_.name} is decorated with {decorator.name}")
        for entry in order:
            if isinstance(entry, Unknown):
                return entry
            if isinstance(entry, str):
                if entry in _WITHOUT_CONSTRUCTOR:
                    continue
                if entry == _STRUCT:
                    return self._from_struct_fields(class_)
                return Unknown(f"{class_.name} is made by its base {entry}")
            if "__new__" in entry.members or _has_metaclass(entry):
                return Unknown(f"{entry.name} decides by itself how its objects are made")
            made = self._made_by(entry)
            if made is not None:
                return made
        return Signature(())

    def abstract_methods(self, class_: Class) -> tuple[str, ...]:
        """Methods for whose want an object of a class cannot be made, as far as the text tells."""
        order = self.linearize(class_)
        if "abc.ABC" not in order and not any(
            isinstance(each, Class) and _has_metaclass(each) for each in order
        ):
            return ()
        missing: dict[str, bool] = {}
        for entry in reversed(order):
            if isinstance(entry, Unknown):
                return ()
            for name, bound in entry.members.items() if isinstance(entry, Class) else ():
                missing[name] = all(
                    isinstance(each, Function)
                    and any(d.name == "abc.abstractmethod" for d in each.decorators)
                    for each in bound.alternatives
                )
        return tuple(name for name, is_missing in missing.items() if is_missing)

    def _made_by(self, class_: Class) -> Signature | Unknown | None:
        """The constructor that a class itself brings, None where it inherits one."""
        options = self._options_of(class_)
        bound = class_.members.get("__init__")
        if bound is not None:
            if any(each.name == "pydantic.dataclasses.dataclass" for each in class_.decorators):
                return Unknown(f"{class_.name} is a pydantic dataclass with an __init__ of its own")
            found = self._settle(class_.name, "__init__", bound)
            if isinstance(found, Function):
                return self._of_function(found)
            return found if isinstance(found, Unknown) else Unknown(f"{class_.name}.__init__")
        if options is not None and options.get("init", True) is not False:
            return self._from_dataclass_fields(class_)
        return None

    def _keeps_class(self, decorator: Decorator) -> bool:
        if decorator.name in _HARMLESS_DECORATORS:
            return True
        found = self.resolve(decorator.name)
        return isinstance(found, Function) and found.returns_its_argument

    def _dataclass_options(self, decorator: Decorator) -> dict[str, Any] | None:
        """The options of a decorator that makes dataclasses, None for any other decorator."""
        if decorator.name in _DATACLASS:
            return dict(decorator.keywords)
        found = self.resolve(decorator.name)
        if isinstance(found, Function) and any(
            each.name in _TRANSFORM for each in found.decorators
        ):
            return dict(decorator.keywords)
        return None

    def _options_of(self, class_: Class) -> dict[str, Any] | None:
        for decorator in class_.decorators:
            options = self._dataclass_options(decorator)
            if options is not None:
                return options
        return None

    def _from_dataclass_fields(self, class_: Class) -> Signature | Unknown:
        order = self.linearize(class_)
        collected: dict[str, tuple[Field, bool]] = {}
        for entry in reversed(order):
            if isinstance(entry, Unknown):
                return entry
            if isinstance(entry, str):
                continue
            options = self._options_of(entry)
            if options is None:
                continue
            if None in options.values() and "kw_only" in options and options["kw_only"] is None:
                return Unknown(f"{entry.name} computes whether its fields are keyword-only")
            for field in entry.fields:
                collected[field.name] = (field, bool(options.get("kw_only")))
        return _from_fields(class_, collected.values())

    def _from_struct_fields(self, class_: Class) -> Signature | Unknown:
        collected: dict[str, tuple[Field, bool]] = {}
        for entry in reversed(self.linearize(class_)):
            if isinstance(entry, Unknown):
                return entry
            if isinstance(entry, Class) and self._is_struct(entry):
                kw_only = bool(dict(entry.keywords).get("kw_only"))
                for field in entry.fields:
                    collected[field.name] = (field, kw_only)
        return _from_fields(class_, collected.values())

    def _is_struct(self, class_: Class) -> bool:
        return _STRUCT in [each for each in self.linearize(class_) if isinstance(each, str)]


def _likelihood(star: str, name: str) -> int:
    """Sorts first the modules whose name a class's name starts with: ``llama`` for LlamaConfig."""
    stem = star.rpartition(".")[2].replace("_", "")
    return -len(stem) if name.lower().startswith(stem) else 0


def _from_fields(class_: Class, collected: Iterable[tuple[Field, bool]]) -> Signature | Unknown:
    positional: list[Parameter] = []
    keyword: list[Parameter] = []
    for field, class_kw_only in collected:
        if not field.certain:
            return Unknown(f"{class_.name}.{field.name} is a field with options that are computed")
        if not field.init:
            continue
        is_keyword = class_kw_only if field.kw_only is None else field.kw_only
        kind = KEYWORD_ONLY if is_keyword else POSITIONAL_OR_KEYWORD
        parameter = Parameter(field.name, kind, field.required, field.type)
        (keyword if is_keyword else positional).append(parameter)
    return Signature((*positional, *keyword))


def _has_metaclass(class_: Class) -> bool:
    return any(name == "metaclass" for name, _ in class_.keywords) and not any(
        base in ("abc.ABC",) for base in class_.bases
    )


def _is_alike(first: Found, second: Found) -> bool:
    """Whether two alternatives are the same but for where they stand."""
    if isinstance(first, (Function, Class, Attribute)) and type(first) is type(second):
        return _without_place(first) == _without_place(second)
    return first == second


def _without_place(definition: Function | Class | Attribute) -> Function | Class | Attribute:
    if isinstance(definition, Class):
        return replace(definition, line=0, end_line=0)
    return replace(definition, line=0)


def _standard_class(dotted: str) -> type | None:
    """A class of the standard library modules that say nothing of the machine."""
    module, _, name = dotted.rpartition(".")
    if module not in _STANDARD_MODULES:
        return None
    found = getattr(importlib.import_module(module), name, None)
    return found if isinstance(found, type) else None


def _standard_has(dotted: str, name: str) -> bool:
    return hasattr(_standard_class(dotted) or object, name)


def _key(entry: Class | str | Unknown) -> str:
    if isinstance(entry, Class):
        return entry.name
    return entry if isinstance(entry, str) else f"? {entry.reason}"


def _merge(sequences: Sequence[Sequence[str]]) -> list[str] | None:
    """Python's own merge of base orders (C3); None where there is none."""
    pending = [list(each) for each in sequences if each]
    merged: list[str] = []
    while pending:
        for sequence in pending:
            head = sequence[0]
            if not any(head in other[1:] for other in pending):
                break
        else:
            return None
        merged.append(head)
        pending = [rest for each in pending if (rest := each[1:] if each[0] == head else each)]
    return merged


__all__ = [
    "Attribute",
    "Bind",
    "Call",
    "Class",
    "Facts",
    "Function",
    "ModuleFacts",
    "Parameter",
    "Signature",
    "Unknown",
    "Verdict",
    "bind",
]
