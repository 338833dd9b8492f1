"""whole-prompts: no prompt is cut without a word."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probing import GENERATE_BY_HAND, GENERATOR, Builds
from standins import carried_out, module_with

from eagle3compat.errors import InputError
from eagle3compat.shim import Status
from eagle3compat.shims.whole_prompts import SHIM, check_prompts


def test_needed_for_both_releases(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.probe(SHIM)
        assert finding.status is Status.NEEDED
        line = builds.text(GENERATOR).splitlines()[(finding.line or 0) - 1]
        assert "ids[:max_len]" in line


def test_drift_where_the_function_was_edited_or_cannot_be_read(installed: Builds) -> None:
    for builds in (
        installed.edited(*GENERATE_BY_HAND),
        installed.edited(GENERATOR, "[ids[:max_len] for ids in input_ids_list]", "input_ids_list"),
        installed.without(GENERATOR),
        installed.without_text(GENERATOR),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


LIMIT, VOCABULARY = 6, 50
TOKENS = st.integers(-3, VOCABULARY + 3)


@given(prompts=st.lists(st.lists(TOKENS, max_size=LIMIT + 1), max_size=4))
def test_exactly_prompts_that_can_be_computed_whole_pass(prompts: list[list[int]]) -> None:
    fits = [1 <= len(prompt) <= LIMIT - 1 for prompt in prompts]
    known = [all(0 <= token < VOCABULARY for token in prompt) for prompt in prompts]
    if prompts and all(fits) and all(known):
        check_prompts(prompts, LIMIT, VOCABULARY)
    else:
        with pytest.raises(InputError):
            check_prompts(prompts, LIMIT, VOCABULARY)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ([[1], []], "prompt 1: expected 1 to 5 tokens .*, found 0"),
        ([[1] * 6], "prompt 0: expected 1 to 5 tokens .*, found 6"),
        ([[1, 50]], "prompt 0: expected token ids from 0 to 49, found 50"),
        ([[1], [2, -1]], "prompt 1: expected token ids from 0 to 49, found -1"),
    ],
)
def test_the_message_names_the_prompt_and_the_limit(prompts: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_prompts(prompts, LIMIT, VOCABULARY)


class Generator:
    def __init__(self) -> None:
        config = SimpleNamespace(max_model_len=LIMIT, get_vocab_size=lambda: VOCABULARY)
        self.vllm_config = SimpleNamespace(model_config=config)
        self.given: Any = None

    def generate(self, token_ids: Any) -> str:
        self.given = token_ids
        return "states"


@pytest.fixture
def module() -> ModuleType:
    return module_with(GENERATOR, VllmHiddenStatesGenerator=Generator)


@pytest.mark.parametrize("as_keyword", [False, True])
def test_the_generator_gets_what_it_was_given(module: ModuleType, as_keyword: bool) -> None:
    prompts = [[1, 2], [3]]
    with carried_out(module, SHIM.id):
        generator = module.VllmHiddenStatesGenerator()
        if as_keyword:
            assert generator.generate(token_ids=prompts) == "states"
        else:
            assert generator.generate(prompts) == "states"
    assert generator.given is prompts


def test_tensors_are_looked_into(module: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    with carried_out(module, SHIM.id):
        generator = module.VllmHiddenStatesGenerator()
        generator.generate(torch.tensor([[1, 2], [3, 4]]))
        generator.generate([torch.tensor([1, 2]), [3]])
        with pytest.raises(InputError, match=r"prompt 1.*found 50"):
            generator.generate(torch.tensor([[1, 2], [3, 50]]))


@pytest.mark.parametrize("token_ids", [[1, 2], [[1, 2.0]], [["a"]], ["words"], [None], [[[1, 2]]]])
def test_what_is_no_list_of_prompts_is_refused(module: ModuleType, token_ids: Any) -> None:
    with carried_out(module, SHIM.id):
        generator = module.VllmHiddenStatesGenerator()
        with pytest.raises(InputError, match="prompt 0: expected a list of whole numbers"):
            generator.generate(token_ids)
    assert generator.given is None


def test_a_tensor_of_one_dimension_is_refused(module: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    with carried_out(module, SHIM.id):
        generator = module.VllmHiddenStatesGenerator()
        with pytest.raises(InputError, match="a list of prompts, even for one"):
            generator.generate(torch.tensor([1, 2, 3]))


def test_arrays_and_other_iterables_are_given_as_lists(module: ModuleType) -> None:
    numpy = pytest.importorskip("numpy")
    with carried_out(module, SHIM.id):
        generator = module.VllmHiddenStatesGenerator()
        for token_ids in (numpy.array([[1, 2], [3, 4]]), ((1, 2), (3, 4)), iter([[1, 2], [3, 4]])):
            generator.generate(token_ids)
            assert [list(prompt) for prompt in generator.given] == [[1, 2], [3, 4]]
            assert isinstance(generator.given, list)


def test_no_request_is_made_of_a_batch_with_one_bad_prompt(module: ModuleType) -> None:
    with carried_out(module, SHIM.id):
        generator = module.VllmHiddenStatesGenerator()
        with pytest.raises(InputError, match="prompt 1"):
            generator.generate([[1], [1] * LIMIT])
    assert generator.given is None


def test_the_check_comes_before_anything_that_a_failed_call_would_clean_up(
    module: ModuleType,
) -> None:
    """finished-requests aborts what a failed call left: a refused call never got that far."""
    vars(module).update(
        Scheduler=type("Scheduler", (), {}), RequestStatus=SimpleNamespace(FINISHED_ABORTED=1)
    )
    with carried_out(module, SHIM.id, "finished-requests"):
        generator = module.VllmHiddenStatesGenerator()  # has no scheduler yet
        with pytest.raises(InputError, match="at least one prompt"):
            generator.generate([])
