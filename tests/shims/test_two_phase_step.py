"""two-phase-step: execute_model and sample_tokens, which were one."""

from __future__ import annotations

from typing import Any

from probing import GENERATOR, Builds
from standins import carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.two_phase_step import SHIM

EXECUTOR = "vllm.v1.executor.multiproc_executor"
BASE = "vllm.v1.executor.abstract"


def unsplit(builds: Builds) -> Builds:
    """An executor whose execute_model does all, as before the split."""
    renamed = builds.edited(EXECUTOR, "def sample_tokens(", "def _sample(")
    text = renamed.text(BASE)
    assert "def sample_tokens(" in text
    return Builds(
        renamed.sources, renamed.texts | {BASE: text.replace("def sample_tokens(", "def _sample(")}
    )


def test_needed_where_the_step_is_split(installed: Builds) -> None:
    finding = installed.probe(SHIM)
    assert finding.status is Status.NEEDED
    line = installed.text(GENERATOR).splitlines()[(finding.line or 0) - 1]
    assert "self.executor.execute_model(" in line


def test_needed_where_the_second_half_is_inherited(installed: Builds) -> None:
    inheriting = installed.edited(EXECUTOR, "def sample_tokens(", "def _sample(")
    assert inheriting.probe(SHIM).status is Status.NEEDED


def test_not_needed_where_the_step_is_whole(installed: Builds) -> None:
    assert unsplit(installed).probe(SHIM).status is Status.NOT_NEEDED


def test_not_needed_where_the_consumer_calls_both(installed: Builds, later: Builds) -> None:
    step = "self.executor.execute_model(scheduler_output)"
    both = installed.edited(GENERATOR, step, f"{step}; self.executor.sample_tokens(None)")
    assert both.probe(SHIM).status is Status.NOT_NEEDED
    assert later.probe(SHIM).status is Status.NOT_NEEDED


def test_drift_where_the_executor_cannot_be_read(installed: Builds) -> None:
    own_half_gone = installed.edited(EXECUTOR, "def sample_tokens(", "def _sample(")
    for builds in (
        installed.without(EXECUTOR),
        installed.without_text(EXECUTOR),
        installed.garbled(EXECUTOR),
        installed.edited(EXECUTOR, "class MultiprocExecutor(", "class ProcessExecutor("),
        own_half_gone.without(BASE),
    ):
        assert builds.probe(SHIM).status is Status.DRIFT


def test_drift_where_the_consumer_steps_in_another_way(installed: Builds) -> None:
    other = installed.edited(GENERATOR, "self.executor.execute_model(", "self.executor.step(")
    assert other.probe(SHIM).status is Status.DRIFT


class Executor:
    def __init__(self, *outputs: Any) -> None:
        self.outputs = list(outputs)
        self.steps: list[Any] = []

    def execute_model(self, scheduler_output: Any) -> Any:
        self.steps.append(scheduler_output)
        return self.outputs.pop(0)

    def sample_tokens(self, grammar_output: Any) -> str:
        self.steps.append(("sample", grammar_output))
        return "sampled"


def test_a_step_that_waits_for_sampling_is_completed() -> None:
    module = module_with(GENERATOR, MultiprocExecutor=Executor)
    with carried_out(module, SHIM.id):
        executor = module.MultiprocExecutor(None)
        assert executor.execute_model("step") == "sampled"
    assert executor.steps == ["step", ("sample", None)]


def test_a_step_that_is_complete_is_not_sampled_again() -> None:
    module = module_with(GENERATOR, MultiprocExecutor=Executor)
    with carried_out(module, SHIM.id):
        executor = module.MultiprocExecutor("output")
        assert executor.execute_model("step") == "output"
    assert executor.steps == ["step"]
