"""Guards round the consumer's generator: workers must be reached, and must answer.

Installed with every plan that changes anything. Before the engine starts, the generator finds out
whether vLLM would load our plugin, and whether workers can be forked (`worker_start`); before it
captures anything, every worker tells which shims are live in it, and afterwards what they chose. A
generator that was made before ``apply()``, or outlives ``restore()``, is half one thing and half
the other: it refuses.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from eagle3compat import worker_start
from eagle3compat.errors import Refusal
from eagle3compat.patching import Patcher
from eagle3compat.payload import Payload
from eagle3compat.settled import choices, settle
from eagle3compat.shim import GENERATOR, TRAINER, WORKER, Patch, Stage, shim

ID = "handshake"
PLUGIN = "eagle3compat"
REPORT = "_eagle3compat_report"
MADE_UNDER = "_eagle3compat_made_under"


def check_plugin_allowed() -> None:
    """Refuse when ``VLLM_PLUGINS``, vLLM's allow-list, keeps our plugin out of the workers.

    Raises:
        Refusal: it is set and does not name our plugin.
    """
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN in allowed.split(","):
        return
    raise Refusal(
        "vllm/plugins/__init__.py:load_plugins_by_group",
        f"VLLM_PLUGINS unset, or naming {PLUGIN}",
        f"VLLM_PLUGINS={allowed!r}, which keeps the shims out of vLLM's workers",
        f"Add {PLUGIN} to VLLM_PLUGINS, or unset it.",
    )


def check_stage(stage: Stage, call_site: str, plan: Payload) -> None:
    """Refuse what the plan that is carried out does not make ready.

    Args:
        stage: what is about to start.
        call_site: where.
        plan: the plan.

    Raises:
        Refusal: the plan is for something else, or this stage's shims do not know the builds.
    """
    if stage.value in plan.stages:
        return
    raise Refusal(
        call_site,
        f"a plan for {stage.value}",
        f"one for {' and '.join(plan.stages)} alone",
        f"Call apply() for {stage.value}; where you did, the shims do not know these builds: "
        "verify-patches says which contract cannot be judged.",
    )


def check_reports(expected: tuple[str, ...], reports: list[dict[str, Any]]) -> None:
    """Refuse when a worker's live shims are not those of the plan.

    Args:
        expected: ids of the plan's shims that act in workers.
        reports: what each worker answered, one entry a rank.

    Raises:
        Refusal: a shim is missing in a worker.
    """
    for rank, report in enumerate(reports):
        missing = sorted(set(expected) - set(report["live"]))
        if missing:
            raise Refusal(
                f"worker {rank} (pid {report['pid']})",
                "the plan's shims live in it",
                f"without {', '.join(missing)}",
                "The worker imported speculators before vLLM loaded its plugins, or another copy "
                "of it. Run eagle3compat bug-report.",
            )


def _guard_generator(module: ModuleType, patcher: Patcher) -> None:
    generator = module.VllmHiddenStatesGenerator

    def before_engine(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        check_plugin_allowed()
        check_stage(Stage.EXTRACTION, f"{GENERATOR}.VllmHiddenStatesGenerator", _current_plan())
        return wrapped(*args, **kwargs)

    def set_up(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        payload = _current_plan()
        expected = tuple(name for name in payload.shims if shim(name).process.in_worker)
        check_reports(expected, _ask_workers(instance.executor))
        result = wrapped(*args, **kwargs)
        for report in _ask_workers(instance.executor):
            for shim_id, choice in report["settled"].items():
                settle(shim_id, choice)
        setattr(instance, MADE_UNDER, payload)
        return result

    def generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not made_under(instance, _current_plan()):
            raise Refusal(
                f"{GENERATOR}.VllmHiddenStatesGenerator.generate",
                "a generator made under the plan that is applied",
                "one made before apply(), or under another plan",
                "Make the generator anew.",
            )
        return wrapped(*args, **kwargs)

    def derive(base: Any) -> type:
        class ExecutorUnderAPlan(base):  # type: ignore[misc]
            _failed_step = ""

            def execute_model(self, *args: Any, **kwargs: Any) -> Any:
                _current_plan()
                if self._failed_step:
                    raise Refusal(
                        f"{GENERATOR}.VllmHiddenStatesGenerator.generate",
                        f"{self.world_size} workers that are in step with each other",
                        f"an earlier step that failed: {self._failed_step}",
                        "Make the generator anew.",
                    )
                try:
                    return super().execute_model(*args, **kwargs)
                except BaseException as error:
                    # One worker told of its failure; the others may be a call further on.
                    if self.world_size > 1:
                        self._failed_step = f"{type(error).__name__}: {error}"
                    raise

        return ExecutorUnderAPlan

    patcher.wrap(generator, "_create_vllm_config", before_engine)
    patcher.wrap(generator, "_setup_capture", set_up)
    patcher.wrap(generator, "generate", generate)
    patcher.extend(module, "MultiprocExecutor", derive)


def _guard_trainer(module: ModuleType, patcher: Patcher) -> None:
    def before_training(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        check_stage(Stage.TRAINING, f"{TRAINER}.Trainer", _current_plan())
        return wrapped(*args, **kwargs)

    patcher.wrap(module.Trainer, "__init__", before_training)


def _current_plan() -> Payload:
    from eagle3compat import applying

    payload = applying.current()
    if payload is None:
        raise Refusal(
            f"{GENERATOR}.VllmHiddenStatesGenerator",
            "the plan that its engine was started with",
            "none: restore() was called since",
            "Call apply() again, or make the generator anew.",
        )
    return payload


def made_under(generator: Any, plan: Payload) -> bool:
    """Whether a generator's workers were found to carry out that very plan."""
    found: Payload | None = getattr(generator, MADE_UNDER, None)
    return found is not None and found.same_plan(plan)


def _ask_workers(executor: Any) -> list[dict[str, Any]]:
    try:
        reports: list[dict[str, Any]] = executor.collective_rpc(REPORT)
    except Exception as error:
        raise Refusal(
            "vLLM's workers",
            "an answer on the shims that are live in them",
            f"{type(error).__name__}: {error}",
            "The plugin entry point did not run there: is eagle3compat installed in the "
            "environment of the workers (not only on sys.path)?",
        ) from error
    return reports


def _answer(self: Any) -> dict[str, Any]:
    from eagle3compat import applying

    return {
        "pid": os.getpid(),
        "live": list(applying.status().live),
        "settled": choices(),
    }


def _add_answer(module: ModuleType, patcher: Patcher) -> None:
    patcher.replace(module.HiddenStatesWorkerExtension, REPORT, _answer)


PATCHES = (
    Patch(GENERATOR, _guard_generator),
    Patch(GENERATOR, worker_start.install),
    Patch(WORKER, _add_answer),
    Patch(TRAINER, _guard_trainer),
)
