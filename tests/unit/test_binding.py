"""Binding agrees with Python's own calls, on generated functions and calls."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3compat.binding import Verdict, bind
from eagle3compat.calls import read_uses
from eagle3compat.reading import read_module
from eagle3compat.records import Call, Function, Signature

NAMES = ("a", "b", "c", "d", "e", "f")


@st.composite
def functions(draw: st.DrawFn) -> str:
    """The head of a function with every kind of parameter there is."""
    names = list(draw(st.permutations(NAMES)))
    counts = [draw(st.integers(0, 2)) for _ in range(3)]
    positional = [names.pop() for _ in range(counts[0])]
    either = [names.pop() for _ in range(counts[1])]
    keyword = [names.pop() for _ in range(counts[2])]
    first_default = draw(st.integers(0, len(positional) + len(either)))
    with_defaults = [
        name if index < first_default else f"{name}=0"
        for index, name in enumerate([*positional, *either])
    ]
    parts = with_defaults[: len(positional)]
    parts += ["/"] if positional else []
    parts += with_defaults[len(positional) :]
    star = draw(st.booleans())
    parts += ["*args"] if star else ["*"] if keyword else []
    parts += [f"{name}=0" if draw(st.booleans()) else name for name in keyword]
    parts += ["**kwargs"] if draw(st.booleans()) else []
    return f"def function({', '.join(parts)}): ..."


@st.composite
def calls(draw: st.DrawFn) -> str:
    positional = ["0"] * draw(st.integers(0, 4))
    keywords = [f"{name}=0" for name in draw(st.sets(st.sampled_from(NAMES), max_size=4))]
    star = ["*sequence"] if draw(st.booleans()) and draw(st.booleans()) else []
    double = ["**mapping"] if draw(st.booleans()) and draw(st.booleans()) else []
    return f"function({', '.join([*positional, *star, *keywords, *double])})"


def signature_of(text: str) -> Signature:
    bindings = read_module("pkg", False, text).bindings
    assert bindings is not None
    function = bindings["function"].alternatives[0]
    assert isinstance(function, Function)
    return Signature(function.parameters, function.is_async)


def call_of(text: str) -> Call:
    (call,) = read_uses("pkg", False, f"from other import function\n{text}").calls
    return call


def binds(function: Any, call: Call, sequence: tuple[int, ...], mapping: dict[str, int]) -> bool:
    keywords = dict.fromkeys(call.keywords, 0)
    if keywords.keys() & mapping.keys():
        return False
    try:
        # Called, not bound by inspect: before Python 3.12.4 Signature.bind refuses a keyword that
        # has the name of a positional-only parameter, where the call itself takes it in **kwargs.
        function(*[0] * call.positional, *sequence, **keywords, **mapping)
    except TypeError:
        return False
    return True


@settings(max_examples=1500, deadline=None)
@given(functions(), calls(), st.data())
def test_verdicts_are_those_of_python(head: str, call_text: str, data: st.DataObject) -> None:
    scope: dict[str, Any] = {}
    exec(head, scope)  # noqa: S102 - a generated head, to be called
    call = call_of(call_text)
    verdict = bind(signature_of(head), call).verdict
    contents = data.draw(
        st.tuples(
            st.lists(st.just(0), max_size=4).map(tuple) if call.star else st.just(()),
            st.dictionaries(st.sampled_from((*NAMES, "other")), st.just(0), max_size=4)
            if call.double_star
            else st.just({}),
        )
    )
    outcome = binds(scope["function"], call, *contents)
    if verdict is Verdict.BINDS:
        assert outcome
    elif verdict is Verdict.BROKEN:
        assert not outcome
    else:
        assert call.star or call.double_star


@given(functions())
def test_parameters_are_read_as_inspect_reads_them(head: str) -> None:
    scope: dict[str, Any] = {}
    exec(head, scope)  # noqa: S102 - a generated head, to be called
    expected = [
        (each.name, each.kind.description, each.default is each.empty)
        for each in inspect.signature(scope["function"]).parameters.values()
    ]
    variadic = ("variadic positional", "variadic keyword")
    ours = {"var-positional": variadic[0], "var-keyword": variadic[1]}
    found = [
        (each.name, ours.get(each.kind, each.kind), each.required)
        for each in signature_of(head).parameters
    ]
    assert found == [
        (name, kind, required and kind not in variadic) for name, kind, required in expected
    ]


@pytest.mark.parametrize(
    ("head", "call", "problem"),
    [
        ("def function(a, b): ...", "function(0)", "missing required argument 'b'"),
        ("def function(a): ...", "function(0, x=0)", "unexpected keyword argument 'x'"),
        ("def function(a, /): ...", "function(a=0)", "positional-only argument 'a'"),
        ("def function(a): ...", "function(0, 0)", "takes 1 positional arguments but 2"),
        ("def function(a): ...", "function(0, a=0)", "multiple values for argument 'a'"),
        ("def function(*, a): ...", "function(0)", "missing required argument 'a'"),
        ("def function(*, a): ...", "function(*sequence)", "missing required argument 'a'"),
        ("def function(a, /): ...", "function(**mapping)", "missing required argument 'a'"),
    ],
)
def test_the_problem_is_named(head: str, call: str, problem: str) -> None:
    result = bind(signature_of(head), call_of(call))
    assert result.is_broken
    assert problem in result.problem


def test_a_starred_call_is_never_said_to_bind() -> None:
    result = bind(signature_of("def function(a): ..."), call_of("function(*sequence)"))
    assert result.verdict is Verdict.CANNOT_TELL


def test_a_signature_is_written_as_python_writes_it() -> None:
    head = "def function(a, /, b, c=1, *, d, e=2, **rest): ..."
    assert str(signature_of(head)) == "(a, /, b, c=…, *, d, e=…, **rest)"
