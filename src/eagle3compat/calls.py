"""The consumer's text turned into demands: what it imports, calls and reads of other packages.

Names are followed as far as one module's text tells: imports, local variables bound once,
attributes of ``self`` bound once in the class, annotated parameters. What is bound twice, or from
what cannot be followed, is not followed.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from eagle3compat.reading import Scope, enter_module_names, parse
from eagle3compat.records import Call, ImportedName, Use, Uses

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_CATCHES_IMPORT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_Bindings: TypeAlias = tuple[
    list[ast.Import | ast.ImportFrom], list[tuple[ast.expr, ast.expr | None]]
]
_BINDS = (
    ast.Assign,
    ast.AnnAssign,
    ast.NamedExpr,
    ast.AugAssign,
    ast.For,
    ast.AsyncFor,
    ast.comprehension,
    ast.withitem,
)
_RESULT = "()"
_OBJECT = re.compile(r"(?<![^.])(_*[A-Z]\w*)\(\)\.")


def read_uses(module: str, is_package: bool, text: str, tree: ast.Module | None = None) -> Uses:
    """What a module calls, reads and imports; nothing where it cannot be parsed."""
    try:
        tree = tree or parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Uses()
    return _UsesReader(module, is_package, tree).read()


class _Names:
    """What local names stand for, as chains: ``pkg.Class()`` is an object of that class."""

    def __init__(self, outer: _Names | None = None) -> None:
        self.chains: dict[str, str | None] = dict(outer.chains) if outer else {}

    def bind(self, name: str, chain: str | None, fresh: set[str]) -> None:
        """Bind a name; a second binding to something else makes it unknown."""
        if name in fresh and self.chains.get(name) != chain:
            chain = None
        fresh.add(name)
        self.chains[name] = chain


class _UsesReader:
    def __init__(self, module: str, is_package: bool, tree: ast.Module) -> None:
        self.scope = Scope(module, is_package)
        self.tree = tree
        self.calls: list[Call] = []
        self.attributes: list[Use] = []
        self.imports: list[ImportedName] = []
        self.guards: set[tuple[str, str]] = set()
        self._bindings: dict[int, _Bindings] = {}
        self.own_attributes: dict[str, str | None] = {}

    def read(self) -> Uses:
        enter_module_names(self.scope, self.tree.body)
        names = _Names()
        names.chains.update(self.scope.names)
        self._block(self.tree.body, "<module>", names, None)
        attributes = (
            each for each in self.attributes if (each.in_function, each.target) not in self.guards
        )
        return Uses(tuple(self.calls), tuple(attributes), tuple(self.imports))

    def bindings_of(self, body: list[ast.stmt]) -> _Bindings:
        """A block's import statements and assignments; a method's are asked for twice."""
        if id(body) not in self._bindings:
            imports: list[ast.Import | ast.ImportFrom] = []
            assignments: list[tuple[ast.expr, ast.expr | None]] = []
            for node in _own_nodes(body):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    imports.append(node)
                elif isinstance(node, _BINDS):
                    assignments += _assignments(node)
            self._bindings[id(body)] = (imports, assignments)
        return self._bindings[id(body)]

    def _block(self, body: list[ast.stmt], function: str, names: _Names, owner: str | None) -> None:
        """Read one function's (or the module's) statements with the names bound in them."""
        visitor = _Visitor(self, function, names, owner)
        visitor.bind_locals(body)
        for statement in body:
            visitor.visit(statement)

    def function(self, node: FunctionNode, name: str, names: _Names, owner: str | None) -> None:
        inner = _Names(names)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in every:
            class_ = self.scope.class_of_annotation(argument.annotation)
            inner.chains[argument.arg] = f"{class_}{_RESULT}" if class_ else None
        for extra in (arguments.vararg, arguments.kwarg):
            if extra:
                inner.chains[extra.arg] = None
        if owner and every and not _is_static(node):
            inner.chains[every[0].arg] = f"{owner}{_RESULT}"
        self._block(node.body, name, inner, owner)

    def class_(self, node: ast.ClassDef, name: str, names: _Names) -> None:
        owner = f"{self.scope.module}.{name}"
        inner = _Names(names)
        for statement in _functions_last(node.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            _Visitor(self, name, inner, None).visit(statement)
        self._bind_own_attributes(node, name, names, owner)
        for statement in node.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.decorators(statement, name, names)
                self.function(statement, f"{name}.{statement.name}", names, owner)

    def decorators(self, node: FunctionNode | ast.ClassDef, name: str, names: _Names) -> None:
        visitor = _Visitor(self, name, names, None)
        for decorator in node.decorator_list:
            visitor.visit(decorator)

    def _bind_own_attributes(
        self, node: ast.ClassDef, name: str, names: _Names, owner: str
    ) -> None:
        """Find what ``self.x`` is, where the class binds it to one thing only."""
        found = _Names()
        fresh: set[str] = set()
        for method in node.body:
            if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if _is_static(method) or not method.args.args:
                continue
            this = method.args.args[0].arg
            inner = _Names(names)
            for argument in [*method.args.args, *method.args.kwonlyargs]:
                class_ = self.scope.class_of_annotation(argument.annotation)
                inner.chains[argument.arg] = f"{class_}{_RESULT}" if class_ else None
            inner.chains[this] = f"{owner}{_RESULT}"
            visitor = _Visitor(self, f"{name}.{method.name}", inner, owner)
            visitor.bind_locals(method.body)
            for target, value in self.bindings_of(method.body)[1]:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == this
                ):
                    found.bind(target.attr, visitor.chain(value) if value else None, fresh)
        for attribute, chain in found.chains.items():
            self.own_attributes[f"{owner}{_RESULT}.{attribute}"] = chain


class _Visitor(ast.NodeVisitor):
    """Collects the uses in one function."""

    def __init__(
        self, reader: _UsesReader, function: str, names: _Names, owner: str | None
    ) -> None:
        self.reader = reader
        self.function = function
        self.names = names
        self.owner = owner
        self.awaited: set[int] = set()
        self.called: set[int] = set()
        self.guarded = False
        self.conditional = False

    def bind_locals(self, body: list[ast.stmt]) -> None:
        fresh: set[str] = set()
        imports, assignments = self.reader.bindings_of(body)
        for node in imports if self.function != "<module>" else ():
            for each in self.reader.scope.imports_of(node):
                self.names.bind(each.name, each.target, fresh)
        for target, value in assignments:
            if isinstance(target, ast.Name):
                self.names.bind(target.id, self.chain(value) if value else None, fresh)

    def chain(self, node: ast.expr) -> str | None:
        """The dotted name, with ``()`` for calls, that an expression stands for."""
        if isinstance(node, ast.Name):
            if node.id in self.names.chains:
                return self.names.chains[node.id]
            return f"builtins.{node.id}" if hasattr(builtins, node.id) else None
        if isinstance(node, ast.Attribute):
            value = self.chain(node.value)
            if value is None:
                return None
            chain = f"{value}.{node.attr}"
            return self.reader.own_attributes.get(chain, chain)
        if isinstance(node, ast.Call):
            callee = self.chain(node.func)
            return callee and f"{callee}{_RESULT}"
        if isinstance(node, (ast.NamedExpr, ast.Await)):
            return self.chain(node.value)
        return None

    def visit_Call(self, node: ast.Call) -> None:
        self.called.add(id(node.func))
        chain = self.chain(node.func)
        if chain is not None and chain.endswith(_RESULT):
            chain += ".__call__"  # What is called is an object.
        if chain is not None:
            target, on_instance = split_instance(chain)
            stars = [each for each in node.args if isinstance(each, ast.Starred)]
            first = node.args[0] if node.args else None
            text = first.value if isinstance(first, ast.Constant) else None
            self.reader.calls.append(
                Call(
                    self.function,
                    target,
                    len(node.args) - len(stars),
                    tuple(each.arg for each in node.keywords if each.arg),
                    bool(stars),
                    any(each.arg is None for each in node.keywords),
                    node.lineno,
                    _text(node.func),
                    on_instance,
                    id(node) in self.awaited,
                    text if isinstance(text, str) else None,
                )
            )
            if target == "builtins.hasattr":
                self._note_guard(node)
        self.generic_visit(node)

    def _note_guard(self, node: ast.Call) -> None:
        if len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            chain = self.chain(node.args[0])
            if chain is not None:
                target, _ = split_instance(f"{chain}.{node.args[1].value!s}")
                self.reader.guards.add((self.function, target))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load) and id(node) not in self.called:
            chain = self.chain(node)
            if chain is not None and chain != self.chain(node.value):
                target, on_instance = split_instance(chain)
                self.reader.attributes.append(
                    Use(self.function, target, node.lineno, _text(node), on_instance, self.guarded)
                )
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        self.awaited.add(id(node.value))
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._note_import([(alias.name, alias.lineno) for alias in node.names])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self.reader.scope.absolute(node.module or "", node.level)
        self._note_import(
            [
                (module if each.name == "*" else f"{module}.{each.name}", each.lineno)
                for each in node.names
            ]
        )

    def _note_import(self, targets: list[tuple[str, int]]) -> None:
        self.reader.imports += [
            ImportedName(target, line, self.function, self.guarded or self.conditional)
            for target, line in targets
        ]

    def visit_If(self, node: ast.If) -> None:
        if getattr(node.test, "id", getattr(node.test, "attr", None)) == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
            return
        self.visit(node.test)
        before = self.conditional
        self.conditional = True
        for statement in (*node.body, *node.orelse):
            self.visit(statement)
        self.conditional = before

    def visit_Try(self, node: ast.Try) -> None:
        before = self.guarded
        self.guarded = before or any(_catches_import(each) for each in node.handlers)
        for statement in node.body:
            self.visit(statement)
        self.guarded = before
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._nested(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._nested(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        inner = _Names(self.names)
        inner.chains.update((argument.arg, None) for argument in arguments)
        _Visitor(self.reader, self.function, inner, self.owner).visit(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        name = self._qualified(node.name)
        self.reader.decorators(node, self.function, self.names)
        for base in node.bases:
            self.visit(base)
        self.reader.class_(node, name, self.names)

    def _nested(self, node: FunctionNode) -> None:
        self.reader.decorators(node, self.function, self.names)
        for default in (*node.args.defaults, *(each for each in node.args.kw_defaults if each)):
            self.visit(default)
        self.reader.function(node, self._qualified(node.name), self.names, None)

    def _qualified(self, name: str) -> str:
        return name if self.function == "<module>" else f"{self.function}.{name}"


def split_instance(chain: str) -> tuple[str, bool]:
    """Take an object for its class: ``pkg.Class().run`` becomes ``pkg.Class.run``, on an instance.

    Only a name in CamelCase is taken for a class here; what a function returns stays ``f().run``
    and is for the provider's text to settle.
    """
    owner = chain.rpartition(".")[0]
    return _OBJECT.sub(r"\1.", chain), owner.endswith(_RESULT)


def _own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a block, without those of functions and classes defined in it."""
    pending = list(body)[::-1]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            pending.extend(list(ast.iter_child_nodes(node))[::-1])


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Targets with what is assigned to them; None where that is no single expression."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                for each in target.elts:
                    yield each, None
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.AugAssign):
        yield node.target, None
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield from _unknown_targets(node.target)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _unknown_targets(node.optional_vars)


def _unknown_targets(target: ast.expr) -> Iterator[tuple[ast.expr, None]]:
    for each in ast.walk(target):
        if isinstance(each, ast.expr):
            yield each, None


def _functions_last(body: list[ast.stmt]) -> list[ast.stmt]:
    return sorted(body, key=lambda node: isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _is_static(node: FunctionNode) -> bool:
    names = {getattr(each, "id", None) for each in node.decorator_list}
    return bool(names & {"staticmethod", "classmethod"})


def _catches_import(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(getattr(each, "id", None) in _CATCHES_IMPORT for each in types)


def _text(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    except (ValueError, RecursionError):
        return "…"
