"""A plan is carried out whole, passed on to children, and undone; engines of other times refuse.

The modules here are small ones of the consumer's shape; the real ones are imported in every order
by the tests in tests/engine.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eagle3compat import applying, plugin, settled
from eagle3compat.applying import PatchError, StaleReferenceWarning
from eagle3compat.errors import Refusal
from eagle3compat.payload import ENVIRONMENT_VARIABLE, Payload
from eagle3compat.shim import GENERATOR, TRAINER, WORKER

GENERATOR_TEXT = """
from types import SimpleNamespace
torch = SimpleNamespace(cuda=SimpleNamespace(_is_in_bad_fork=lambda: False))

class MultiprocExecutor:
    def __init__(self, workers):
        self.workers = workers
        self.world_size = len(workers)

    def collective_rpc(self, method, args=()):
        return [getattr(worker, method)(*args) for worker in self.workers]

    def execute_model(self, step):
        if isinstance(step, BaseException):
            raise step

    def sample_tokens(self, grammar):
        return "sampled"

class VllmHiddenStatesGenerator:
    def __init__(self, workers):
        self._create_vllm_config()
        self.executor = MultiprocExecutor(workers)
        self._setup_capture()

    def _create_vllm_config(self):
        pass

    def _setup_capture(self):
        self.executor.collective_rpc("_setup_hidden_states_capture", args=([0],))

    def generate(self, token_ids):
        return self.executor.execute_model(token_ids)
"""
WORKER_TEXT = """
class HiddenStatesWorkerExtension:
    def _setup_hidden_states_capture(self, layer_ids):
        from eagle3compat.settled import settle
        settle("decoder-layers", "chosen in the worker")
"""
TRAINER_TEXT = """
class Trainer:
    def __init__(self, model):
        self.model = model
"""


@pytest.fixture
def consumer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of the consumer's name and shape, which hides the one that is installed."""
    folder = tmp_path / "speculators"
    texts = ((GENERATOR, GENERATOR_TEXT), (WORKER, WORKER_TEXT), (TRAINER, TRAINER_TEXT))
    for package in (folder, folder / "data_generation", folder / "train"):
        package.mkdir()
        (package / "__init__.py").touch()
    for module, text in texts:
        tmp_path.joinpath(*module.split(".")).with_suffix(".py").write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "speculators"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    yield folder
    applying.stop()
    for name in [name for name in sys.modules if name.partition(".")[0] == "speculators"]:
        del sys.modules[name]


def plan(consumer: Path, *shims: str, stages: tuple[str, ...] = ("extraction",)) -> Payload:
    vllm = str(consumer.parent / "vllm")
    return Payload("0.1.0", os.getpid(), shims, str(consumer), vllm, stages)


def both() -> tuple[ModuleType, ModuleType]:
    return importlib.import_module(GENERATOR), importlib.import_module(WORKER)


def make_generator() -> Any:
    generator, worker = both()
    return generator.VllmHiddenStatesGenerator([worker.HiddenStatesWorkerExtension()])


# --- extraction and training ---------------------------------------------------------------------


def test_a_plan_for_training_alone_lets_no_generator_start(consumer: Path) -> None:
    applying.start(plan(consumer, "two-phase-step", stages=("training",)))
    with pytest.raises(Refusal, match="expected a plan for extraction; found one for training"):
        make_generator()
    assert importlib.import_module(TRAINER).Trainer("a model").model == "a model"


def test_a_plan_that_cannot_judge_training_lets_no_trainer_start(consumer: Path) -> None:
    applying.start(plan(consumer, "two-phase-step"))
    with pytest.raises(Refusal, match="expected a plan for training; found one for extraction"):
        importlib.import_module(TRAINER).Trainer("a model")
    assert make_generator().generate([[1]]) == "sampled"


def test_plans_for_other_stages_are_not_the_same(consumer: Path) -> None:
    both_stages = plan(consumer, "two-phase-step", stages=("extraction", "training"))
    assert not both_stages.same_plan(plan(consumer, "two-phase-step"))
    assert Payload.from_json(both_stages.to_json()) == both_stages


# --- engines that were made at another time ------------------------------------------------------


def test_a_generator_made_under_the_plan_works(consumer: Path) -> None:
    applying.start(plan(consumer, "two-phase-step"))
    assert make_generator().generate([[1]]) == "sampled"


@pytest.mark.parametrize("subclass", [False, True])
def test_a_generator_made_before_apply_is_named_and_refuses(consumer: Path, subclass: bool) -> None:
    generator, worker = both()
    kind = generator.VllmHiddenStatesGenerator
    if subclass:
        kind = type("TheirGenerator", (kind,), {})
    early = kind([worker.HiddenStatesWorkerExtension()])
    with pytest.warns(StaleReferenceWarning, match=f"a live {kind.__name__}"):
        applying.start(plan(consumer, "two-phase-step"))
    with pytest.raises(Refusal, match=r"made before apply\(\)"):
        early.generate([[1]])


def test_a_generator_that_outlives_restore_refuses_until_the_plan_is_back(consumer: Path) -> None:
    payload = plan(consumer, "two-phase-step")
    applying.start(payload)
    generator = make_generator()
    assert any("a live VllmHiddenStatesGenerator" in left for left in applying.stop())
    with pytest.raises(Refusal, match=r"restore\(\)"):
        generator.generate([[1]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is no stranger to this plan
        applying.start(payload)
    assert generator.generate([[1]]) == "sampled"


def test_a_generator_of_another_plan_refuses(consumer: Path) -> None:
    applying.start(plan(consumer, "two-phase-step"))
    generator = make_generator()
    applying.stop()
    with pytest.warns(StaleReferenceWarning):
        applying.start(plan(consumer, "warm-up", "two-phase-step"))
    with pytest.raises(Refusal, match="another plan"):
        generator.generate([[1]])


@pytest.mark.parametrize("error", [RuntimeError("rank 0 failed"), KeyboardInterrupt()])
def test_after_a_failed_step_of_several_workers_the_engine_is_done(
    consumer: Path, error: BaseException
) -> None:
    """The others wait for sample_tokens: the next step would fail in them, and hang here."""
    applying.start(plan(consumer, "two-phase-step"))
    generator, worker = both()
    pair = [worker.HiddenStatesWorkerExtension(), worker.HiddenStatesWorkerExtension()]
    engine = generator.VllmHiddenStatesGenerator(pair)
    assert engine.generate([[1]]) == "sampled"
    with pytest.raises(type(error)):
        engine.generate(error)
    with pytest.raises(Refusal, match="2 workers that are in step.*" + type(error).__name__):
        engine.generate([[1]])


def test_after_a_failed_step_of_one_worker_the_engine_goes_on(consumer: Path) -> None:
    applying.start(plan(consumer, "two-phase-step"))
    engine = make_generator()
    with pytest.raises(RuntimeError, match="failed"):
        engine.generate(RuntimeError("failed"))
    assert engine.generate([[1]]) == "sampled"


def test_what_workers_chose_is_heard(consumer: Path) -> None:
    applying.start(plan(consumer, "two-phase-step"))
    generator, worker = both()
    answers = iter([{}, {"decoder-layers": "chosen in the worker"}])

    class Worker(worker.HiddenStatesWorkerExtension):  # type: ignore[name-defined,misc]
        """Its notes are its own, as those of another process are."""

        def _setup_hidden_states_capture(self, layer_ids: list[int]) -> None:
            pass

        def _eagle3compat_report(self) -> dict[str, Any]:
            return {**super()._eagle3compat_report(), "settled": next(answers)}

    generator.VllmHiddenStatesGenerator([Worker()])
    assert dict(applying.status().settled) == {"decoder-layers": "chosen in the worker"}


# --- all or nothing ------------------------------------------------------------------------------


def test_warnings_as_errors_leave_nothing_applied(consumer: Path) -> None:
    early = make_generator()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StaleReferenceWarning):
            applying.start(plan(consumer, "two-phase-step"))
    assert not applying.status().applied
    assert ENVIRONMENT_VARIABLE not in os.environ
    assert early.generate([[1]]) is None


def test_a_module_that_was_executing_while_the_plan_was_undone_is_left_alone(
    consumer: Path,
) -> None:
    """Its thread waits for the lock that restore() holds."""
    session = applying._Session(plan(consumer, "two-phase-step"))
    session.start()
    session.stop()
    generator, _ = both()
    before = generator.MultiprocExecutor
    session._executed(generator)
    assert generator.MultiprocExecutor is before


def test_another_vllm_than_the_planned_one_is_refused(
    consumer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = ModuleType("vllm")
    vllm.__file__ = str(consumer.parent / "elsewhere" / "vllm" / "__init__.py")
    applying.start(plan(consumer, "two-phase-step"))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(PatchError, match=r"plan was made for the vLLM in .*elsewhere"):
        importlib.import_module(GENERATOR)
    vllm.__file__ = str(consumer.parent / "vllm" / "__init__.py")
    importlib.import_module(GENERATOR)


# --- the variable --------------------------------------------------------------------------------


def test_a_plan_of_nothing_displaces_the_one_of_a_process_further_up(consumer: Path) -> None:
    """With everything switched off here, workers must not carry out what a grandparent planned."""
    os.environ[ENVIRONMENT_VARIABLE] = plan(consumer, "two-phase-step").to_json()
    applying.start(plan(consumer))
    text = os.environ[ENVIRONMENT_VARIABLE]
    assert Payload.from_json(text).shims == ()
    applying.stop()
    assert ENVIRONMENT_VARIABLE not in os.environ


def test_applying_again_mends_a_variable_that_was_lost(consumer: Path) -> None:
    payload = plan(consumer, "two-phase-step")
    applying.start(payload)
    del os.environ[ENVIRONMENT_VARIABLE]
    applying.start(payload)
    assert Payload.from_json(os.environ[ENVIRONMENT_VARIABLE]) == payload


def test_a_forked_child_that_applies_passes_the_plan_on_as_its_own(consumer: Path) -> None:
    """Its workers look for the applier among their ancestors; the parent may be gone by then."""
    payload = plan(consumer, "two-phase-step")
    applying.start(Payload(**(vars(payload) | {"applier": 1})))
    applying.start(payload)
    assert Payload.from_json(os.environ[ENVIRONMENT_VARIABLE]).applier == os.getpid()


@pytest.mark.parametrize("text", ["no JSON", "[]", "1", '{"shims": []}', '{"shims": 3}'])
def test_a_variable_that_holds_something_else_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"{ENVIRONMENT_VARIABLE} holds no plan of ours"):
        Payload.from_json(text)


def test_the_plugin_does_nothing_without_the_variable(consumer: Path) -> None:
    plugin.carry_out_in_worker()
    assert applying.current() is None
    assert settled.choices() == {}
