"""warm-up: what initialize_from_config did, and no longer does from vLLM 0.27 on."""

from __future__ import annotations

from typing import Any

from probing import GENERATOR, Builds
from standins import carried_out, module_with

from eagle3compat.shim import Status
from eagle3compat.shims.warm_up import SHIM

ABSTRACT = "vllm.v1.executor.abstract"
BEFORE = "    def determine_available_memory("
SPLIT = "    def compile_or_warm_up_model(self):\n        pass\n\n"


def test_not_needed_where_the_executor_has_no_warm_up_of_its_own(installed: Builds) -> None:
    assert installed.probe(SHIM).status is Status.NOT_NEEDED


def test_needed_where_it_was_split_off(installed: Builds, later: Builds) -> None:
    for builds in (installed, later):
        finding = builds.edited(ABSTRACT, BEFORE, SPLIT + BEFORE).probe(SHIM)
        assert finding.status is Status.NEEDED
        line = builds.text(GENERATOR).splitlines()[(finding.line or 0) - 1]
        assert "initialize_from_config(" in line


def test_drift_where_the_warm_up_wants_more(installed: Builds) -> None:
    wanting = SPLIT.replace("(self)", "(self, mode)")
    assert installed.edited(ABSTRACT, BEFORE, wanting + BEFORE).probe(SHIM).status is Status.DRIFT


def test_drift_where_the_executor_cannot_be_read(installed: Builds) -> None:
    assert installed.garbled(ABSTRACT).probe(SHIM).status is Status.DRIFT


def test_the_warm_up_follows_the_initialization() -> None:
    done: list[Any] = []

    class MultiprocExecutor:
        def initialize_from_config(self, configs: list[str]) -> str:
            done.append(configs)
            return "initialized"

        def compile_or_warm_up_model(self) -> None:
            done.append("warm")

    module = module_with(GENERATOR, MultiprocExecutor=MultiprocExecutor)
    with carried_out(module, SHIM.id):
        assert module.MultiprocExecutor().initialize_from_config(["config"]) == "initialized"
    assert done == [["config"], "warm"]
