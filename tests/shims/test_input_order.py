"""input-order: results in the order of the inputs."""

from __future__ import annotations

from types import FunctionType

from hypothesis import given
from hypothesis import strategies as st
from probing import GENERATE_BY_HAND, GENERATOR, Builds
from standins import carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.input_order import SHIM, by_index


def test_needed_where_ids_are_sorted_as_text(later: Builds) -> None:
    finding = later.probe(SHIM)
    assert finding.status is Status.NEEDED
    line = later.text(GENERATOR).splitlines()[(finding.line or 0) - 1]
    assert "sorted(request_id_to_idx" in line


def test_the_later_generator_sorts_nothing_else(later: Builds) -> None:
    # The shim rebinds the name for the whole module.
    assert later.text(GENERATOR).count("sorted(") == 1


def test_not_needed_where_results_follow_the_inputs(installed: Builds) -> None:
    assert installed.probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_the_function_was_edited_or_cannot_be_read(
    installed: Builds, later: Builds
) -> None:
    for builds in (
        installed.edited(*GENERATE_BY_HAND),
        later.edited(*GENERATE_BY_HAND),
        installed.without(GENERATOR),
        installed.without_text(GENERATOR),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


@given(
    call=st.integers(0, 10**6),
    order=st.integers(0, 40).flatmap(lambda n: st.permutations(range(n))),
)
def test_ids_come_in_the_order_of_their_index(call: int, order: list[int]) -> None:
    shuffled = [f"req_{call}_{index}" for index in order]
    assert by_index(shuffled) == [f"req_{call}_{index}" for index in range(len(order))]


def test_the_module_sorts_by_index_while_patched() -> None:
    module = module_with(GENERATOR)
    module.order = FunctionType((lambda ids: sorted(ids)).__code__, vars(module))
    with carried_out(module, SHIM.id):
        assert module.order({"req_0_10": 10, "req_0_2": 2}.keys()) == ["req_0_2", "req_0_10"]
    assert module.order(["req_0_10", "req_0_2"]) == ["req_0_10", "req_0_2"]
