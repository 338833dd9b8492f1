"""Facts tell what is there, what is not, and what the text cannot tell."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from handmade import read, write_package

from eagle3compat.cache import FactsCache
from eagle3compat.facts import Attribute, Class, Facts, Function, Signature, Unknown
from eagle3compat.sources import open_source


def signature(facts: Facts, dotted: str) -> str:
    found = facts.look_up_signature(dotted)
    assert isinstance(found, Signature), found
    return str(found)


def test_reexports_aliases_and_relative_imports_are_followed(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        {
            "vllm.config": "from .model import ModelConfig as Config\nAlias = Config",
            "vllm.config.model": "class ModelConfig:\n    def __init__(self, model, seed=0): ...",
        },
    )
    assert signature(facts, "vllm.config.Config") == "(model, seed=…)"
    assert signature(facts, "vllm.config.Alias") == "(model, seed=…)"


def test_star_imports_respect_all_and_underscores(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        {
            "vllm.a": "from .listed import *\nfrom .plain import *",
            "vllm.listed": "__all__ = ['_shown']\ndef _shown(): ...\ndef hidden(): ...",
            "vllm.plain": "def visible(): ...\ndef _private(): ...",
        },
    )
    assert isinstance(facts.resolve("vllm.a._shown"), Function)
    assert isinstance(facts.resolve("vllm.a.visible"), Function)
    assert facts.resolve("vllm.a.hidden") is None
    assert facts.resolve("vllm.a._private") is None


def test_an_absent_name_and_an_absent_module_are_absent(tmp_path: Path) -> None:
    facts = read(tmp_path, {"vllm.a": "x = 1"})
    assert facts.resolve("vllm.a.y") is None
    assert facts.resolve("vllm.b.x") is None


def test_a_package_without_source_is_unknown_not_absent(tmp_path: Path) -> None:
    facts = read(tmp_path, {"vllm.a": "from msgspec import Struct"})
    assert isinstance(facts.resolve("msgspec.Struct"), Unknown)
    found = facts.resolve("vllm.a.Struct")
    assert isinstance(found, Unknown)
    assert found.exists


def test_a_lazy_package_yields_what_its_table_lists_and_is_unsure_of_others(tmp_path: Path) -> None:
    text = (
        "import typing\n"
        "NAMES = {'LLM': '.llm:LLM'}\n"
        "if typing.TYPE_CHECKING:\n    from vllm.more import More\n"
        "else:\n    def __getattr__(name): ...\n"
    )
    facts = read(
        tmp_path,
        {"vllm": text, "vllm.llm": "class LLM: ...", "vllm.more": "class More: ..."},
    )
    assert isinstance(facts.resolve("vllm.LLM"), Class)
    assert isinstance(facts.resolve("vllm.More"), Class)
    assert isinstance(facts.resolve("vllm.Other"), Unknown)


def test_different_definitions_under_conditions_cannot_be_told_apart(tmp_path: Path) -> None:
    text = (
        "if platform():\n    def step(a): ...\nelse:\n    def step(b): ...\n"
        "try:\n    from fast import kernel\nexcept ImportError:\n    kernel = None\n"
    )
    facts = read(tmp_path, {"vllm.a": text})
    found = facts.resolve("vllm.a.step")
    assert isinstance(found, Unknown)
    assert found.exists
    assert isinstance(facts.resolve("vllm.a.kernel"), Unknown)


def test_alike_definitions_under_conditions_are_one(tmp_path: Path) -> None:
    text = "if platform():\n    def step(a): return 1\nelse:\n    def step(a): return 2\n"
    assert signature(read(tmp_path, {"vllm.a": text}), "vllm.a.step") == "(a)"


def test_a_name_bound_under_a_condition_alone_may_be_absent(tmp_path: Path) -> None:
    facts = read(tmp_path, {"vllm.a": "if platform():\n    def step(a): ...\n"})
    found = facts.resolve("vllm.a.step")
    assert isinstance(found, Unknown)
    assert not found.exists


def test_a_later_unconditional_definition_wins(tmp_path: Path) -> None:
    text = "if platform():\n    def step(a): ...\ndef step(b): ...\n"
    assert signature(read(tmp_path, {"vllm.a": text}), "vllm.a.step") == "(b)"


def test_an_except_clause_that_raises_leaves_one_definition(tmp_path: Path) -> None:
    text = "try:\n    def step(a): ...\nexcept ImportError:\n    raise\n"
    assert signature(read(tmp_path, {"vllm.a": text}), "vllm.a.step") == "(a)"


def test_names_for_type_checkers_are_not_there_at_run_time(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.b import Thing\n"
    facts = read(tmp_path, {"vllm.a": text, "vllm.b": "class Thing: ..."})
    assert facts.resolve("vllm.a.Thing") is None


def test_a_text_that_cannot_be_parsed_is_unknown(tmp_path: Path) -> None:
    facts = read(tmp_path, {"vllm.a": "def f(:\n"})
    found = facts.look_up_signature("vllm.a.f")
    assert isinstance(found, Unknown)
    assert "cannot parse" in found.reason


def test_constructors_follow_bases_across_files(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        {
            "vllm.base": "class Base:\n    def __init__(self, config, *, name): ...",
            "vllm.derived": "from vllm.base import Base\nclass Derived(Base):\n    x = 1",
            "vllm.plain": "class Plain: ...",
        },
    )
    assert signature(facts, "vllm.derived.Derived") == "(config, *, name)"
    assert signature(facts, "vllm.plain.Plain") == "()"


def test_bases_are_searched_in_pythons_order(tmp_path: Path) -> None:
    text = """
class Root:
    def step(self, root): ...
class Left(Root): ...
class Right(Root):
    def step(self, right): ...
class Both(Left, Right): ...
"""
    assert signature(read(tmp_path, {"vllm.a": text}), "vllm.a.Both.step") == "(right)"


def test_an_unknown_base_makes_what_it_might_bring_unknown(tmp_path: Path) -> None:
    text = "from elsewhere import Base\nclass A(Base):\n    def own(self, x): ...\n"
    facts = read(tmp_path, {"vllm.a": text})
    assert signature(facts, "vllm.a.A.own") == "(x)"
    assert isinstance(facts.look_up_signature("vllm.a.A"), Unknown)
    assert facts.has_member("vllm.a.A", "own") is True
    assert facts.has_member("vllm.a.A", "other") is None


def test_members_are_found_in_bases_fields_and_assignments_to_self(tmp_path: Path) -> None:
    text = """
class Base:
    inherited = 1
class A(Base):
    annotated: int
    def __init__(self):
        self.assigned = 1
        self.typed: int = 2
        self.first, self.second = 1, 2
    @property
    def computed(self): ...
"""
    facts = read(tmp_path, {"vllm.a": text})
    for name in ("inherited", "annotated", "assigned", "typed", "first", "second", "computed"):
        assert facts.has_member("vllm.a.A", name) is True, name
    assert facts.has_member("vllm.a.A", "absent") is False


def test_a_class_with_getattr_may_have_anything(tmp_path: Path) -> None:
    facts = read(tmp_path, {"vllm.a": "class A:\n    def __getattr__(self, name): ...\n"})
    assert facts.has_member("vllm.a.A", "anything") is None


def test_members_of_enums_are_known(tmp_path: Path) -> None:
    text = "import enum\nclass Status(enum.IntEnum):\n    WAITING = enum.auto()\n"
    facts = read(tmp_path, {"vllm.a": text})
    assert isinstance(facts.resolve("vllm.a.Status.WAITING"), Attribute)
    assert isinstance(facts.resolve("vllm.a.Status.WAITING.value"), Unknown)
    assert facts.resolve("vllm.a.Status.FINISHED") is None


def test_static_and_class_methods_lose_no_argument_too_many(tmp_path: Path) -> None:
    text = """
class A:
    @staticmethod
    def still(x): ...
    @classmethod
    def made(cls, y): ...
    def bound(self, z): ...
"""
    facts = read(tmp_path, {"vllm.a": text})
    assert signature(facts, "vllm.a.A.still") == "(x)"
    assert signature(facts, "vllm.a.A.made") == "(y)"
    assert signature(facts, "vllm.a.A.bound") == "(z)"


def test_an_unknown_decorator_makes_a_signature_unknown(tmp_path: Path) -> None:
    text = """
from functools import wraps
from elsewhere import mystery
def same(function):
    return function
def factory(text):
    def decorate(function):
        function.text = text
        return function
    return decorate
def wrapping(function):
    @wraps(function)
    def inner(*args, **kwargs): return function(*args, **kwargs)
    return inner
@same
def a(x): ...
@factory("t")
def b(x): ...
@wrapping
def c(x): ...
@mystery
def d(x): ...
"""
    facts = read(tmp_path, {"vllm.a": text})
    for name in "abc":
        assert signature(facts, f"vllm.a.{name}") == "(x)"
    assert isinstance(facts.look_up_signature("vllm.a.d"), Unknown)


def test_overloads_are_not_the_function(tmp_path: Path) -> None:
    text = "from typing import overload\n@overload\ndef f(a): ...\ndef f(a, b=1): ...\n"
    assert signature(read(tmp_path, {"vllm.a": text}), "vllm.a.f") == "(a, b=…)"


DATACLASSES = {
    "plain": """
@dataclass
class Config:
    first: int
    second: int = 1
    listed: ClassVar[int] = 2
    given: InitVar[int] = 3
    made: list = field(default_factory=list)
    hidden: int = field(init=False, default=0)
    named: int = field(kw_only=True)
""",
    "inherited": """
@dataclass
class Base:
    a: int
    b: int = 1
@dataclass
class Config(Base):
    c: int = 2
    a: int = 5
""",
    "keyword-only": """
@dataclass(kw_only=True)
class Config:
    a: int
    b: int = 1
""",
    "keyword-only from a line on": """
@dataclass
class Config:
    a: int
    _: KW_ONLY
    b: int
    c: int = 1
""",
    "own constructor": """
@dataclass
class Config:
    a: int
    def __init__(self, other): ...
""",
    "undecorated child": """
@dataclass
class Base:
    a: int
class Config(Base):
    b: int
""",
}
_HEAD = "from dataclasses import KW_ONLY, InitVar, dataclass, field\nfrom typing import ClassVar\n"


@pytest.mark.parametrize("text", DATACLASSES.values(), ids=DATACLASSES.keys())
def test_dataclasses_take_what_python_gives_them(text: str, tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    exec(compile(_HEAD + text, "config", "exec", dont_inherit=True), scope)  # noqa: S102
    expected = [
        (each.name, each.kind is each.KEYWORD_ONLY, each.default is each.empty)
        for each in inspect.signature(scope["Config"]).parameters.values()
    ]
    found = read(tmp_path, {"vllm.a": _HEAD + text}).signature("vllm.a.Config")
    assert found is not None
    assert [(e.name, e.kind == "keyword-only", e.required) for e in found.parameters] == expected


def test_config_decorators_of_vllm_make_dataclasses(tmp_path: Path) -> None:
    utils = """
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform
@dataclass_transform(field_specifiers=())
def config(cls=None, *, config=None, **kwargs):
    def decorator(cls): return dataclass(cls, config=config, **kwargs)
    return decorator if cls is None else decorator(cls)
def old_config(cls):
    return cls
"""
    text = """
from dataclasses import InitVar, dataclass
from pydantic import Field
from vllm.utils import config, old_config
@config
class New:
    required: InitVar[int]
    ellipsis: int = Field(...)
    default: int = Field(default=1, ge=0)
    positional: int = Field(1)
@old_config
@dataclass
class Old:
    required: int
    optional: int = 0
"""
    facts = read(tmp_path, {"vllm.utils": utils, "vllm.a": text})
    assert signature(facts, "vllm.a.New") == "(required, ellipsis, default=…, positional=…)"
    assert signature(facts, "vllm.a.Old") == "(required, optional=…)"


def test_structs_take_their_fields(tmp_path: Path) -> None:
    text = """
import msgspec
class Mixin: ...
class Params(Mixin, msgspec.Struct, omit_defaults=True):
    n: int
    temperature: float = 1.0
class Named(msgspec.Struct, kw_only=True):
    a: int
"""
    facts = read(tmp_path, {"vllm.a": text})
    assert signature(facts, "vllm.a.Params") == "(n, temperature=…)"
    assert signature(facts, "vllm.a.Named") == "(*, a)"


def test_results_are_followed_by_return_annotations(tmp_path: Path) -> None:
    text = """
from __future__ import annotations
from typing import Optional
class Output:
    total: int
class Scheduler:
    def schedule(self) -> Output: ...
    def maybe(self) -> "Optional[Output]": ...
    def either(self) -> int | str: ...
"""
    facts = read(tmp_path, {"vllm.a": text})
    assert isinstance(facts.resolve("vllm.a.Scheduler.schedule().total"), Attribute)
    assert isinstance(facts.resolve("vllm.a.Scheduler.maybe().total"), Attribute)
    assert facts.resolve("vllm.a.Scheduler.schedule().gone") is None
    assert isinstance(facts.resolve("vllm.a.Scheduler.either().real"), Unknown)


def test_calls_on_known_objects_are_followed(tmp_path: Path) -> None:
    consumer = """
from vllm.a import Executor, make
class Generator:
    def __init__(self):
        self.executor = Executor(1)
        self.config = make()
    def run(self, executor: Executor):
        local = Executor(2)
        local.step(1)
        executor.step(2)
        self.executor.step(3, key=4)
        self.config.step(5)
        maybe = Executor(1)
        maybe = None
        maybe.step(6)
"""
    facts = read(
        tmp_path,
        {"vllm.a": "class Executor:\n    def step(self, x, key=0): ...\ndef make(): ..."},
        {"speculators.data_generation.g": consumer},
    )
    calls = facts.calls("speculators.data_generation.g", "vllm.a.Executor.step")
    assert [(call.line, call.keywords, call.on_instance) for call in calls] == [
        (9, (), True),
        (10, (), True),
        (11, ("key",), True),
    ]
    assert "vllm.a.make().step" in {c.target for c in facts.calls("speculators.data_generation.g")}


def test_calls_are_found_by_the_defining_name_too(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        {"vllm.config": "from .model import C", "vllm.config.model": "class C: ..."},
        {"speculators.a": "from vllm.config import C\nC()"},
    )
    assert len(facts.calls("speculators.a", "vllm.config.model.C")) == 1
    assert len(facts.calls("speculators.a", "vllm.config.C")) == 1


def test_warm_facts_equal_cold_ones_and_follow_edits(tmp_path: Path) -> None:
    tree = write_package(tmp_path / "tree", {"vllm.a": "def f(x): ..."})

    def ask() -> str:
        facts = Facts(open_source(tree, "vllm"), cache=FactsCache(tmp_path / "cache"))
        found = signature(facts, "vllm.a.f")
        facts.save()
        return found

    assert ask() == "(x)"
    assert ask() == "(x)"
    (tree / "vllm" / "a.py").write_text("def f(x, longer): ...")
    assert ask() == "(x, longer)"


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"module vllm.a": [1, 2]}', b"\xff"])
def test_a_damaged_cache_is_read_past(damage: bytes, tmp_path: Path) -> None:
    tree = write_package(tmp_path / "tree", {"vllm.a": "def f(x): ..."})
    for _ in range(2):
        facts = Facts(open_source(tree, "vllm"), cache=FactsCache(tmp_path / "cache"))
        assert signature(facts, "vllm.a.f") == "(x)"
        facts.save()
        for file in (tmp_path / "cache").iterdir():
            file.write_bytes(damage)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    tree = write_package(tmp_path / "tree", {"vllm.a": "def f(x): ..."})
    facts = Facts(open_source(tree, "vllm"), cache=FactsCache(blocker / "cache"))
    assert signature(facts, "vllm.a.f") == "(x)"
    facts.save()


def test_every_record_survives_the_cache(tmp_path: Path) -> None:
    from eagle3compat.reading import read_module
    from eagle3compat.records import from_plain, to_plain

    text = Path(dataclasses.__file__).read_text()
    facts = read_module("dataclasses", False, text)
    assert facts.bindings
    assert from_plain(to_plain(facts)) == facts
