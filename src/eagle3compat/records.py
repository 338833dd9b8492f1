"""What a module's source text says, as plain records that go to JSON and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

POSITIONAL_ONLY = "positional-only"
POSITIONAL_OR_KEYWORD = "positional or keyword"
VAR_POSITIONAL = "var-positional"
KEYWORD_ONLY = "keyword-only"
VAR_KEYWORD = "var-keyword"


@dataclass(frozen=True)
class Parameter:
    """One parameter; ``type`` is the dotted name of its class where the annotation gives one."""

    name: str
    kind: str
    required: bool
    type: str | None = None

    def __str__(self) -> str:
        stars = {VAR_POSITIONAL: "*", VAR_KEYWORD: "**"}.get(self.kind, "")
        optional = "" if self.required or stars else "=…"
        return f"{stars}{self.name}{optional}"


@dataclass(frozen=True)
class Signature:
    """What a callable takes, without ``self``."""

    parameters: tuple[Parameter, ...]
    is_async: bool = False

    def takes(self, name: str) -> bool:
        """Whether the keyword is accepted, by a parameter of its own or by ``**keywords``."""
        return self.names(name) or any(each.kind == VAR_KEYWORD for each in self.parameters)

    def names(self, name: str) -> bool:
        """Whether a parameter of this name can be given by keyword."""
        kinds = (POSITIONAL_OR_KEYWORD, KEYWORD_ONLY)
        return any(each.name == name and each.kind in kinds for each in self.parameters)

    def requires(self, name: str) -> bool:
        """Whether a parameter of this name must be given."""
        return any(each.name == name and each.required for each in self.parameters)

    def __str__(self) -> str:
        """As Python writes it, with its ``/`` and ``*``."""
        words: list[str] = []
        previous = ""
        for each in self.parameters:
            if previous == POSITIONAL_ONLY and each.kind != POSITIONAL_ONLY:
                words.append("/")
            if each.kind == KEYWORD_ONLY and previous not in (KEYWORD_ONLY, VAR_POSITIONAL):
                words.append("*")
            words.append(str(each))
            previous = each.kind
        if previous == POSITIONAL_ONLY:
            words.append("/")
        return f"{'async ' if self.is_async else ''}({', '.join(words)})"


@dataclass(frozen=True)
class Decorator:
    """A decorator by resolved name; ``keywords`` holds its constant keyword arguments."""

    name: str
    keywords: tuple[tuple[str, Any], ...] = ()

    def option(self, keyword: str, default: Any) -> Any:
        return dict(self.keywords).get(keyword, default)


@dataclass(frozen=True)
class Function:
    """A function or method; ``parameters`` has ``self`` or ``cls`` where the text has it.

    Args:
        name: dotted name.
        role: ``function``, ``method``, ``class method``, ``static method`` or ``property``.
        returns: dotted name of the class that the return annotation gives.
        returns_its_argument: the whole body is ``return`` of the first parameter.
        wraps: the body defines an inner ``(*args, **kwargs)`` function marked with functools.wraps.
    """

    name: str
    parameters: tuple[Parameter, ...]
    decorators: tuple[Decorator, ...]
    role: str
    is_async: bool
    returns: str | None
    line: int
    returns_its_argument: bool = False
    wraps: bool = False


@dataclass(frozen=True)
class Field:
    """An annotated name in a class body, as a dataclass would read it.

    ``kw_only`` is None where the class decides.
    """

    name: str
    type: str | None
    required: bool
    init: bool = True
    kw_only: bool | None = None
    certain: bool = True


@dataclass(frozen=True)
class Attribute:
    """A name bound to a value: ``alias`` is the dotted name it stands for, ``value`` a constant."""

    name: str
    line: int
    type: str | None = None
    alias: str | None = None
    value: Any = None


@dataclass(frozen=True)
class Import:
    """A name bound by an import, and the dotted name of what it stands for."""

    name: str
    target: str
    line: int


@dataclass(frozen=True)
class Bound:
    """What a name may be bound to after its block has run.

    ``definitely`` is False where some way through the block leaves it unbound.
    """

    alternatives: tuple[Binding, ...]
    definitely: bool


@dataclass(frozen=True)
class Class:
    """A class.

    Args:
        name: dotted name.
        bases: resolved dotted names; ``?`` for an expression that cannot be resolved.
        keywords: constant class keywords, such as a Struct's ``kw_only``; others have value None.
        fields: annotated names of the body in order, without class variables.
        members: names bound in the body.
        line: first line, without decorators.
        end_line: last line; what the methods set on ``self`` is looked up there when asked for.
    """

    name: str
    bases: tuple[str, ...]
    keywords: tuple[tuple[str, Any], ...]
    decorators: tuple[Decorator, ...]
    fields: tuple[Field, ...]
    members: dict[str, Bound]
    line: int
    end_line: int

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the functions that the body defines."""
        return tuple(
            name
            for name, bound in self.members.items()
            if any(isinstance(each, Function) for each in bound.alternatives)
        )


Binding: TypeAlias = Function | Class | Attribute | Import


@dataclass(frozen=True)
class Call:
    """A call in the consumer's text.

    Args:
        in_function: qualified name of the function it stands in, ``<module>`` outside of any.
        target: dotted name of what is called, resolved through the module's imports. ``()`` stands
            for the result of a call: ``pkg.make().run`` is a method of what ``pkg.make`` returned.
        positional: number of positional arguments before any ``*``.
        keywords: names given by keyword.
        star: there is a ``*sequence``.
        double_star: there is a ``**mapping``.
        line: line of the call.
        local_name: the name as the text has it, ``self.scheduler.add_request``.
        on_instance: what is called belongs to an object of the class named in the target.
        awaited: the result is awaited.
        first_text: the first argument where it is a literal string, as for ``collective_rpc``.
    """

    in_function: str
    target: str
    positional: int
    keywords: tuple[str, ...]
    star: bool
    double_star: bool
    line: int
    local_name: str
    on_instance: bool = False
    awaited: bool = False
    first_text: str | None = None


@dataclass(frozen=True)
class Use:
    """An attribute read from a known object or module, other than as the callee of a call."""

    in_function: str
    target: str
    line: int
    local_name: str
    on_instance: bool
    guarded: bool


@dataclass(frozen=True)
class ImportedName:
    """An import statement's demand: the dotted name that must exist.

    ``guarded`` means that the import stands in a ``try`` which catches its failure, or under an
    ``if`` that may not let it run.
    """

    target: str
    line: int
    in_function: str
    guarded: bool


@dataclass(frozen=True)
class Uses:
    """What a module does with the names of others."""

    calls: tuple[Call, ...] = ()
    attributes: tuple[Use, ...] = ()
    imports: tuple[ImportedName, ...] = ()


@dataclass(frozen=True)
class ModuleFacts:
    """What one module defines.

    Args:
        name: dotted name.
        is_package: it is an ``__init__``.
        problem: why the text could not be read, where it could not.
        bindings: names bound at module level.
        star_imports: modules whose names are imported by ``*``, in order.
        exports: ``__all__``, where it is a literal.
        is_lazy: it has ``__getattr__`` or replaces itself in ``sys.modules``.
        lazy_names: names that a lazy module yields, with what they stand for.
        lazy_stars: modules whose names a lazy module yields too.
        is_dynamic: it binds names by computed name.
    """

    name: str
    is_package: bool = False
    problem: str | None = None
    bindings: dict[str, Bound] | None = None
    star_imports: tuple[str, ...] = ()
    exports: tuple[str, ...] | None = None
    is_lazy: bool = False
    lazy_names: dict[str, str] | None = None
    lazy_stars: tuple[str, ...] = ()
    is_dynamic: bool = False


@dataclass(frozen=True)
class Unknown:
    """The text cannot tell, and why. ``exists`` is True where only the nature is in doubt."""

    reason: str
    exists: bool = False


_RECORDS: tuple[type[Any], ...] = (
    Parameter,
    Decorator,
    Function,
    Field,
    Attribute,
    Import,
    Bound,
    Class,
    Call,
    Use,
    ImportedName,
    Uses,
    ModuleFacts,
)
_CODES = {record: code for code, record in enumerate(_RECORDS)}
_SCALARS = frozenset((str, int, bool, float, type(None)))


def to_plain(value: Any) -> Any:
    """A record as lists, dicts and scalars, for JSON: ``{"_": code, "v": values}``."""
    kind = type(value)
    code = _CODES.get(kind)
    if code is not None:
        # vars() has the fields in order, since a frozen record's __init__ sets them so.
        plain = [
            each if type(each) in _SCALARS else to_plain(each) for each in vars(value).values()
        ]
        return {"_": code, "v": plain}
    if kind is tuple:
        return [each if type(each) in _SCALARS else to_plain(each) for each in value]
    if kind is dict:
        return {"d": {name: to_plain(each) for name, each in value.items()}}
    return value


def from_plain(plain: Any) -> Any:
    """The record that ``to_plain`` wrote; on other input KeyError, TypeError or IndexError."""
    if isinstance(plain, list):
        return tuple([from_plain(each) for each in plain])
    if isinstance(plain, dict):
        if "d" in plain:
            return {name: from_plain(each) for name, each in plain["d"].items()}
        return _RECORDS[plain["_"]](*[from_plain(each) for each in plain["v"]])
    return plain


__all__ = [
    "KEYWORD_ONLY",
    "POSITIONAL_ONLY",
    "POSITIONAL_OR_KEYWORD",
    "VAR_KEYWORD",
    "VAR_POSITIONAL",
    "Attribute",
    "Binding",
    "Bound",
    "Call",
    "Class",
    "Decorator",
    "Field",
    "Function",
    "Import",
    "ImportedName",
    "ModuleFacts",
    "Parameter",
    "Signature",
    "Unknown",
    "Use",
    "Uses",
    "from_plain",
    "to_plain",
]
