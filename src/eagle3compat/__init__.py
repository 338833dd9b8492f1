"""Makes speculators extract right hidden states on the vLLM that is installed, or refuses.

``import eagle3compat; eagle3compat.apply()`` before the generator is made. Importing this package
and applying import neither torch, transformers, vllm nor speculators.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["apply", "installed_plan", "restore", "status", "verify"]

if TYPE_CHECKING:
    from eagle3compat.applying import Status
    from eagle3compat.plan import Plan
    from eagle3compat.verification import Report


def installed_plan(stage: str = "extraction") -> Plan:
    """What ``apply()`` would do for the installed builds, decided from their source text.

    Args:
        stage: "extraction", where vLLM is the provider; or "training", which needs no vLLM.

    Raises:
        BuildNotFoundError: speculators is not installed; or vLLM, for extraction; or transformers,
            for training.
        InputError: ``EAGLE3COMPAT_DISABLE`` names no shim.
    """
    return _installed_plans(stage)[0]


def apply(training_only: bool = False) -> Plan:
    """Carry out the plan for the installed builds, in this process and in vLLM's workers.

    Imports none of the packages concerned: modules that are loaded already are patched now, others
    when they are imported. Calling it again does nothing more. speculators' training code is
    repaired too; where its contracts cannot be judged, its trainer refuses, and extraction goes on.

    Args:
        training_only: repair the training code alone, which needs no vLLM; extraction refuses.

    Returns:
        The plan that is being carried out: that of extraction, or of training alone.

    Raises:
        BuildNotFoundError: vLLM or speculators is not installed; see `installed_plan`.
        InputError: ``EAGLE3COMPAT_DISABLE`` names no shim.
        Refusal: some contract between the two cannot be judged, or workers cannot be reached.
        PatchError: a replacement failed; everything is as it was before.
    """
    from eagle3compat import applying, handshake
    from eagle3compat.payload import Payload

    stages = ("training",) if training_only else ("extraction", "training")
    made, *others = _installed_plans(*stages)
    made.check()
    if made.needed and not training_only:
        handshake.check_plugin_allowed()
    plans = [made, *(other for other in others if not other.drift)]
    shims = {decision.shim.id: None for plan in plans for decision in plan.needed}
    applying.start(
        Payload(
            version=__version__,
            applier=os.getpid(),
            shims=tuple(shims),
            consumer_dir=str(made.consumer.package_dir),
            provider_dir="" if training_only else str(made.provider.package_dir),
            stages=tuple(plan.stage.value for plan in plans),
        )
    )
    return made


def restore() -> tuple[str, ...]:
    """Undo what ``apply()`` did in this process, exactly.

    A live engine and its workers keep code that they were started with: such a generator refuses
    to go on, until the same plan is applied again.

    Returns:
        What was left alone: places that somebody patched over since, and live generators.
    """
    from eagle3compat import applying

    return applying.stop()


def status() -> Status:
    """What is live in this process: shims, patched modules, stale references."""
    from eagle3compat import applying

    return applying.status()


def _installed_plans(*stages: str) -> list[Plan]:
    """The plans of stages from one reading of the sources; all but the first where they can be."""
    from eagle3compat.errors import BuildNotFoundError
    from eagle3compat.facts import Facts
    from eagle3compat.installed import Build, find_build
    from eagle3compat.plan import disabled_by_environment, make_plan
    from eagle3compat.shim import Stage
    from eagle3compat.sources import installed_sources

    providers = {Stage.EXTRACTION: "vllm", Stage.TRAINING: "transformers"}
    consumer = find_build("speculators")
    wanted: dict[Stage, Build] = {}
    for stage in map(Stage, stages):
        try:
            wanted[stage] = find_build(providers[stage])
        except BuildNotFoundError:
            if not wanted:
                raise
    facts = Facts(*installed_sources(consumer, *wanted.values()))
    disabled = disabled_by_environment()
    plans = [
        make_plan(facts, consumer, provider, disabled, stage) for stage, provider in wanted.items()
    ]
    facts.save()
    return plans


def verify(vllm: str | None = None, speculators: str | None = None) -> Report:
    """Check every call between the two builds, from source text alone.

    Args:
        vllm: None for the installed one; or a version requirement, wheel, sdist or folder.
        speculators: likewise.

    Returns:
        The same objects that ``verify-patches --json`` prints.
    """
    from eagle3compat.verification import verify as verify_builds

    return verify_builds(vllm=vllm, speculators=speculators)
