"""A module's text turned into records: what it binds, under which conditions.

The standard library's ``ast`` reads it. A reader that keeps one definition a name would be wrong
here: of two definitions in ``if``/``else`` or ``try``/``except`` either may be the live one.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

from eagle3compat.records import (
    KEYWORD_ONLY,
    POSITIONAL_ONLY,
    POSITIONAL_OR_KEYWORD,
    VAR_KEYWORD,
    VAR_POSITIONAL,
    Attribute,
    Binding,
    Bound,
    Class,
    Decorator,
    Field,
    Function,
    Import,
    ModuleFacts,
    Parameter,
)

_OVERLOADS = ("typing.overload", "typing_extensions.overload")
_SELF_ASSIGNED = re.compile(r"^[ \t]*self\.(\w+)[ \t]*(?::|(?:[-+*/|&]|//)?=(?!=))", re.MULTILINE)
_SELF_IN_TUPLE = re.compile(
    r"^[ \t]*\(?((?:[\w.\[\]]+[ \t]*,\s*)+[\w.\[\]]*)\)?[ \t]*=(?!=)", re.MULTILINE
)
_SELF_AS = re.compile(r"\b(?:as|for)[ \t]+self\.(\w+)")
_DYNAMIC_CLASS = re.compile(r"def __getattr(?:ibute)?__\(|\bsetattr\(\s*self\b|self\.__dict__")
_WRAPPER = re.compile(
    r"@(?:functools\.)?wraps\([^)]*\)\s+(?:async )?def \w+\([^)]*\*args[^)]*\*\*kw"
)
_DYNAMIC_MODULE = re.compile(r"^[ \t]*(?:globals\(\)\s*(?:\[|\.update)|exec\()", re.MULTILINE)
_REPLACES_ITSELF = re.compile(r"sys\.modules\[__name__\]\s*=")

Environment = dict[str, Bound]
FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def parse(text: str) -> ast.Module:
    """The syntax tree of a module; raises SyntaxError, ValueError or RecursionError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The provider's invalid escapes are not ours to report.
        return ast.parse(text)


def read_module(
    name: str, is_package: bool, text: str, tree: ast.Module | None = None
) -> ModuleFacts:
    """What a module's text binds. A text that this Python cannot parse gives a ``problem``."""
    try:
        tree = tree or parse(text)
        return _ModuleReader(name, is_package, text, tree).read()
    except SyntaxError as error:
        problem = f"Python {sys.version_info[0]}.{sys.version_info[1]} cannot parse it"
        return ModuleFacts(name, is_package, f"{problem} (line {error.lineno}: {error.msg})")
    except (ValueError, RecursionError, MemoryError) as error:
        return ModuleFacts(name, is_package, f"cannot be parsed ({type(error).__name__})")


class Scope:
    """Names of a module, for turning expressions into dotted names."""

    def __init__(self, module: str, is_package: bool) -> None:
        self.module = module
        self.package = module if is_package else module.rpartition(".")[0]
        self.names: dict[str, str] = {}

    def add_imports(self, node: ast.Import | ast.ImportFrom) -> list[Import]:
        """Enter what an import statement binds; ``*`` binds nothing here."""
        found = [each for each in self.imports_of(node) if each.name != "*"]
        self.names.update((each.name, each.target) for each in found)
        return found

    def imports_of(self, node: ast.Import | ast.ImportFrom) -> list[Import]:
        if isinstance(node, ast.ImportFrom):
            module = self.absolute(node.module or "", node.level)
            return [
                Import(alias.asname or alias.name, f"{module}.{alias.name}", node.lineno)
                for alias in node.names
            ]
        return [
            Import(alias.asname, alias.name, node.lineno)
            if alias.asname
            else Import(alias.name.partition(".")[0], alias.name.partition(".")[0], node.lineno)
            for alias in node.names
        ]

    def absolute(self, module: str, level: int) -> str:
        if not level:
            return module
        parts = self.package.split(".")
        base = ".".join(parts[: len(parts) - level + 1])
        return f"{base}.{module}" if module else base

    def dotted(self, node: ast.expr | None) -> str | None:
        """The dotted name that a name, attribute or subscripted generic stands for."""
        if isinstance(node, ast.Name):
            known = self.names.get(node.id)
            if known is None and hasattr(builtins, node.id):
                return f"builtins.{node.id}"
            return known or f"{self.module}.{node.id}"
        if isinstance(node, ast.Attribute):
            value = self.dotted(node.value)
            return value and f"{value}.{node.attr}"
        if isinstance(node, ast.Subscript):
            return self.dotted(node.value)
        return None

    def class_of_annotation(self, node: ast.expr | None) -> str | None:
        """The class that an annotation names; ``X | None`` and ``Optional[X]`` name X."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value.strip(), mode="eval").body
            except SyntaxError:
                return None
            return self.class_of_annotation(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            sides = [side for side in (node.left, node.right) if not _is_none(side)]
            return self.class_of_annotation(sides[0]) if len(sides) == 1 else None
        if isinstance(node, ast.Subscript):
            name = self.dotted(node.value) or ""
            if name.rpartition(".")[2] in ("Optional", "Annotated", "Final", "InitVar"):
                inner = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
                return self.class_of_annotation(inner)
            return name if name.startswith("builtins.") else None
        return self.dotted(node) if isinstance(node, (ast.Name, ast.Attribute)) else None


class _ModuleReader:
    def __init__(self, name: str, is_package: bool, text: str, tree: ast.Module) -> None:
        self.scope = Scope(name, is_package)
        self.is_package = is_package
        self.text = text
        self.tree = tree
        self.star_imports: list[str] = []
        self.wrapper_lines = [
            text.count("\n", 0, found.start()) + 1
            for found in (_WRAPPER.finditer(text) if "wraps(" in text else ())
        ]
        self.lazy_names: dict[str, str] = {}
        self.lazy_stars: list[str] = []

    def read(self) -> ModuleFacts:
        enter_module_names(self.scope, self.tree.body)
        bindings: Environment = {}
        _Block(self, self.scope.module).run(self.tree.body, bindings)
        replaces_itself = "sys.modules" in self.text and _REPLACES_ITSELF.search(self.text)
        is_lazy = "__getattr__" in bindings or bool(replaces_itself)
        may_be_dynamic = "globals()" in self.text or "exec(" in self.text
        return ModuleFacts(
            self.scope.module,
            self.is_package,
            None,
            bindings,
            tuple(self.star_imports),
            _literal_exports(self.tree.body),
            is_lazy,
            self.lazy_names if is_lazy else None,
            tuple(self.lazy_stars) if is_lazy else (),
            may_be_dynamic and bool(_DYNAMIC_MODULE.search(self.text)),
        )

    def note_lazy_imports(self, statements: Iterable[ast.stmt]) -> None:
        """A lazy module repeats for type checkers, as real imports, what it yields."""
        for statement in statements:
            for node in ast.walk(statement):
                if not isinstance(node, (ast.Import, ast.ImportFrom)):
                    continue
                for each in self.scope.imports_of(node):
                    if each.name == "*":
                        self.lazy_stars.append(each.target[:-2])
                    else:
                        self.lazy_names.setdefault(each.name, each.target)

    def note_lazy_table(self, value: ast.expr) -> None:
        """A table from names to ``.module:attribute``, as ``vllm/__init__.py`` keeps one."""
        if not isinstance(value, ast.Dict):
            return
        for key, entry in zip(value.keys, value.values, strict=True):
            if not (isinstance(key, ast.Constant) and isinstance(entry, ast.Constant)):
                return
            module, colon, attribute = str(entry.value).partition(":")
            if not colon or not isinstance(key.value, str):
                return
            level = len(module) - len(module.lstrip("."))
            target = self.scope.absolute(module.lstrip("."), level)
            self.lazy_names[key.value] = f"{target}.{attribute}"

    def function(self, node: FunctionNode, owner: str) -> Function:
        decorators = self.decorators(node)
        names = {each.name for each in decorators}
        role = "function" if owner == self.scope.module else "method"
        if "builtins.staticmethod" in names:
            role = "static method"
        elif "builtins.classmethod" in names or node.name == "__init_subclass__":
            role = "class method"
        elif any(each.rpartition(".")[2] in ("property", "cached_property") for each in names):
            role = "property"
        return Function(
            f"{owner}.{node.name}",
            self.parameters(node.args),
            decorators,
            role,
            isinstance(node, ast.AsyncFunctionDef),
            self.scope.class_of_annotation(node.returns),
            node.lineno,
            _returns_its_argument(node),
            any(node.lineno < line <= (node.end_lineno or 0) for line in self.wrapper_lines),
        )

    def decorators(self, node: FunctionNode | ast.ClassDef) -> tuple[Decorator, ...]:
        found = []
        for each in node.decorator_list:
            call = each if isinstance(each, ast.Call) else None
            name = self.scope.dotted(call.func if call else each) or "?"
            keywords = _constant_keywords(call.keywords) if call else ()
            found.append(Decorator(name, keywords))
        return tuple(found)

    def parameters(self, arguments: ast.arguments) -> tuple[Parameter, ...]:
        positional = [(each, POSITIONAL_ONLY) for each in arguments.posonlyargs]
        positional += [(each, POSITIONAL_OR_KEYWORD) for each in arguments.args]
        first_default = len(positional) - len(arguments.defaults)
        found = [
            self.parameter(each, kind, index < first_default)
            for index, (each, kind) in enumerate(positional)
        ]
        if arguments.vararg:
            found.append(self.parameter(arguments.vararg, VAR_POSITIONAL, False))
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            found.append(self.parameter(each, KEYWORD_ONLY, default is None))
        if arguments.kwarg:
            found.append(self.parameter(arguments.kwarg, VAR_KEYWORD, False))
        return tuple(found)

    def parameter(self, argument: ast.arg, kind: str, required: bool) -> Parameter:
        return Parameter(
            argument.arg, kind, required, self.scope.class_of_annotation(argument.annotation)
        )

    def class_(self, node: ast.ClassDef, owner: str) -> Class:
        name = f"{owner}.{node.name}"
        members: Environment = {}
        _Block(self, name).run(node.body, members)
        return Class(
            name,
            tuple(self.scope.dotted(base) or "?" for base in node.bases),
            _constant_keywords(node.keywords),
            self.decorators(node),
            self.fields(node.body),
            members,
            node.lineno,
            node.end_lineno or node.lineno,
        )

    def fields(self, body: Sequence[ast.stmt]) -> tuple[Field, ...]:
        found: list[Field] = []
        kw_only: bool | None = None
        for statement in body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(
                statement.target, ast.Name
            ):
                continue
            outer = statement.annotation
            if isinstance(outer, ast.Constant) and isinstance(outer.value, str):
                try:
                    outer = ast.parse(outer.value.strip(), mode="eval").body
                except SyntaxError:
                    outer = statement.annotation
            outer_name = (self.scope.dotted(outer) or "").rpartition(".")[2]
            if outer_name == "KW_ONLY":
                kw_only = True
            elif outer_name != "ClassVar":
                type_ = self.scope.class_of_annotation(statement.annotation)
                found.append(self.field(statement.target.id, type_, statement.value, kw_only))
        return tuple(found)

    def field(
        self, name: str, type_: str | None, value: ast.expr | None, kw_only: bool | None
    ) -> Field:
        if not isinstance(value, ast.Call):
            return Field(name, type_, value is None, True, kw_only)
        specifier = (self.scope.dotted(value.func) or "?").rpartition(".")[2]
        if specifier not in ("field", "Field"):
            # A call of something else is a default, unless that something makes a field: msgspec
            # and dataclasses only know their own.
            return Field(name, type_, False, True, kw_only)
        given = {each.arg: each.value for each in value.keywords}
        default = given.get("default", given.get("default_factory"))
        if default is None and specifier == "Field" and value.args:
            default = value.args[0]
        required = default is None or (isinstance(default, ast.Constant) and default.value is ...)
        init, own_kw_only = (
            _constant(given.get("init"), True),
            _constant(given.get("kw_only"), kw_only),
        )
        certain = None not in given and not {"alias", "validation_alias"} & set(given)
        return Field(name, type_, required, init is not False, own_kw_only, certain)


class _Block:
    """Runs a block's statements for what they bind, keeping alternatives apart."""

    def __init__(self, reader: _ModuleReader, owner: str) -> None:
        self.reader = reader
        self.owner = owner
        self.is_module = owner == reader.scope.module

    def run(self, statements: Sequence[ast.stmt], bindings: Environment) -> bool:
        """Enter the bindings; returns True where the block never reaches its end."""
        for statement in statements:
            if isinstance(statement, (ast.Raise, ast.Return, ast.Continue, ast.Break)):
                return True
            handler = self._HANDLERS.get(type(statement))
            if handler is not None and handler(self, statement, bindings):
                return True
        return False

    def _define(self, node: Any, bindings: Environment) -> None:
        if isinstance(node, ast.ClassDef):
            _bind(bindings, node.name, self.reader.class_(node, self.owner))
            return
        function = self.reader.function(node, self.owner)
        names = {each.name for each in function.decorators}
        if names & set(_OVERLOADS):
            return
        if any(each.endswith((f"{node.name}.setter", f"{node.name}.deleter")) for each in names):
            return
        _bind(bindings, node.name, function)

    def _import(self, node: Any, bindings: Environment) -> None:
        for each in self.reader.scope.imports_of(node):
            if each.name == "*":
                self.reader.star_imports.append(each.target[:-2])
            else:
                _bind(bindings, each.name, each)

    def _assign(self, node: Any, bindings: Environment) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node, ast.AnnAssign) and node.value is None:
            if not self.is_module:
                self._bind_value(node.target, node, bindings)
            return
        for target in targets:
            self._bind_value(target, node, bindings)
        if self.is_module and isinstance(node.value, ast.Dict):
            self.reader.note_lazy_table(node.value)

    def _bind_value(self, target: ast.expr, node: Any, bindings: Environment) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._bind_value(each, node, bindings)
        elif isinstance(target, ast.Name):
            scope = self.reader.scope
            annotation = getattr(node, "annotation", None)
            value = getattr(node, "value", None)
            is_name = isinstance(value, (ast.Name, ast.Attribute))
            single = isinstance(target, ast.Name) and not isinstance(node, ast.AugAssign)
            alias = scope.dotted(value) if is_name and single else None
            constant = value.value if isinstance(value, ast.Constant) else None
            if not isinstance(constant, (str, int, float, bool)):
                constant = None
            type_ = scope.class_of_annotation(annotation)
            _bind(
                bindings,
                target.id,
                Attribute(f"{self.owner}.{target.id}", node.lineno, type_, alias, constant),
            )

    def _if(self, node: Any, bindings: Environment) -> bool:
        decided = _static_condition(node.test)
        if decided == "type checking" and self.is_module:
            self.reader.note_lazy_imports(node.body)
        if decided in ("type checking", "never"):
            return self.run(node.orelse, bindings)
        if decided == "run time":
            return self.run(node.body, bindings)
        return self._branches([node.body, node.orelse], bindings)

    def _try(self, node: Any, bindings: Environment) -> bool:
        arms = [[*node.body, *node.orelse], *(handler.body for handler in node.handlers)]
        ended = self._branches(arms, bindings)
        return self.run(node.finalbody, bindings) or ended

    def _with(self, node: Any, bindings: Environment) -> bool:
        return self.run(node.body, bindings)

    def _loop(self, node: Any, bindings: Environment) -> bool:
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._bind_value(
                node.target, ast.Assign([node.target], node.iter, lineno=node.lineno), bindings
            )
        self._branches([node.body, []], bindings)
        return self.run(node.orelse, bindings)

    def _match(self, node: Any, bindings: Environment) -> bool:
        return self._branches([*(case.body for case in node.cases), []], bindings)

    def _delete(self, node: Any, bindings: Environment) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                bindings.pop(target.id, None)

    def _branches(self, arms: Sequence[Sequence[ast.stmt]], bindings: Environment) -> bool:
        ends: list[Environment] = []
        for statements in arms:
            bound: Environment = {}
            if not self.run(statements, bound):
                ends.append(bound)
        for name in dict.fromkeys(name for end in ends for name in end):
            found = [end[name] for end in ends if name in end]
            alternatives = [each for bound in found for each in bound.alternatives]
            definitely = len(found) == len(ends) and all(bound.definitely for bound in found)
            before = bindings.get(name)
            if not definitely and before is not None:
                alternatives = [*before.alternatives, *alternatives]
                definitely = before.definitely
            bindings[name] = Bound(tuple(alternatives), definitely)
        return not ends

    _HANDLERS: ClassVar[dict[type[ast.stmt], Any]] = {
        ast.FunctionDef: _define,
        ast.AsyncFunctionDef: _define,
        ast.ClassDef: _define,
        ast.Import: _import,
        ast.ImportFrom: _import,
        ast.Assign: _assign,
        ast.AnnAssign: _assign,
        ast.AugAssign: _assign,
        ast.If: _if,
        ast.Try: _try,
        ast.With: _with,
        ast.For: _loop,
        ast.While: _loop,
        ast.Match: _match,
        ast.Delete: _delete,
    }


def enter_module_names(scope: Scope, statements: Iterable[ast.stmt]) -> None:
    """Enter every name that module-level statements bind, in any branch, typing-only ones too."""
    for node in statements:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            scope.add_imports(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope.names[node.name] = f"{scope.module}.{node.name}"
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            for block in ("body", "orelse", "finalbody"):
                enter_module_names(scope, getattr(node, block, ()))
            for handler in getattr(node, "handlers", ()):
                # What an except clause puts in place of a failed import is the poorer name.
                known = dict(scope.names)
                enter_module_names(scope, handler.body)
                scope.names.update(known)


def _bind(bindings: Environment, name: str, binding: Binding) -> None:
    bindings[name] = Bound((binding,), True)


def _static_condition(test: ast.expr) -> str | None:
    """``type checking``, ``run time`` or ``never`` where the outcome is known, else None."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _static_condition(test.operand)
        return {"type checking": "run time", "run time": "never", "never": "run time"}.get(
            inner or ""
        )
    if getattr(test, "id", getattr(test, "attr", None)) == "TYPE_CHECKING":
        return "type checking"
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = test.left, test.comparators[0]
        is_version = isinstance(left, ast.Attribute) and left.attr == "version_info"
        if is_version and isinstance(right, ast.Tuple):
            wanted = tuple(_constant(each, None) for each in right.elts)
            if all(isinstance(each, int) for each in wanted):
                have = sys.version_info[: len(wanted)]
                outcome = {
                    ast.GtE: have >= wanted,
                    ast.Gt: have > wanted,
                    ast.Lt: have < wanted,
                    ast.LtE: have <= wanted,
                }.get(type(test.ops[0]))  #
                if outcome is not None:
                    return "run time" if outcome else "never"
    return None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _constant(node: ast.expr | None, default: Any) -> Any:
    return node.value if isinstance(node, ast.Constant) else default


def _constant_keywords(keywords: Iterable[ast.keyword]) -> tuple[tuple[str, Any], ...]:
    found = []
    for each in keywords:
        value = _constant(each.value, None)
        if not isinstance(value, (str, int, float, bool)):
            value = None
        found.append((each.arg or "**", value))
    return tuple(found)


def _literal_exports(body: Iterable[ast.stmt]) -> tuple[str, ...] | None:
    exports: tuple[str, ...] | None = None
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not isinstance(target, ast.Name) or target.id != "__all__":
            continue
        value = getattr(node, "value", None)
        if not isinstance(value, (ast.List, ast.Tuple)):
            return None
        names = [_constant(each, None) for each in value.elts]
        if not all(isinstance(name, str) for name in names):
            return None
        exports = (*(exports or ()), *names)
    return exports


def _returns_its_argument(node: FunctionNode) -> bool:
    """Whether a decorator gives back what it decorates, itself or through one it makes."""
    *before, last = node.body
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Name):
        return False
    first = next(iter([*node.args.posonlyargs, *node.args.args]), None)
    if first is not None and last.value.id == first.arg:
        rebinds = (each for part in before for each in ast.walk(part))
        return not any(
            isinstance(each, (ast.Return, ast.Yield, ast.YieldFrom))
            or (isinstance(each, ast.Name) and each.id == first.arg and not _is_load(each))
            for each in rebinds
        )
    return any(
        isinstance(each, ast.FunctionDef)
        and each.name == last.value.id
        and _returns_its_argument(each)
        for each in before
    )


def _is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def attributes_set_on_self(class_text: str) -> frozenset[str] | None:
    """The names that a class's methods set on ``self``; None where some are computed.

    By pattern, not by syntax tree: few classes are asked for it, and most are large.
    """
    if _DYNAMIC_CLASS.search(class_text):
        return None
    found = set(_SELF_ASSIGNED.findall(class_text))
    found.update(_SELF_AS.findall(class_text))
    for group in _SELF_IN_TUPLE.findall(class_text):
        found.update(re.findall(r"\bself\.(\w+)", group))
    return frozenset(found)
