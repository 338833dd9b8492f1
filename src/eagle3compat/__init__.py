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


def installed_plan() -> Plan:
    """What ``apply()`` would do for the installed builds, decided from their source text.

    Raises:
        BuildNotFoundError: vLLM or speculators is not installed.
        InputError: ``EAGLE3COMPAT_DISABLE`` names no shim.
    """
    from eagle3compat.facts import Facts
    from eagle3compat.installed import find_build
    from eagle3compat.plan import disabled_by_environment, make_plan
    from eagle3compat.sources import installed_sources

    consumer, provider = find_build("speculators"), find_build("vllm")
    facts = Facts(*installed_sources(consumer, provider))
    made = make_plan(facts, consumer, provider, disabled_by_environment())
    facts.save()
    return made


def apply() -> Plan:
    """Carry out the plan for the installed builds, in this process and in vLLM's workers.

    Imports none of the packages concerned: modules that are loaded already are patched now, others
    when they are imported. Calling it again does nothing more.

    Returns:
        The plan that is being carried out.

    Raises:
        BuildNotFoundError: vLLM or speculators is not installed.
        InputError: ``EAGLE3COMPAT_DISABLE`` names no shim.
        Refusal: some contract between the two cannot be judged, or workers cannot be reached.
        PatchError: a replacement failed; everything is as it was before.
    """
    from eagle3compat import applying, handshake
    from eagle3compat.payload import Payload

    made = installed_plan()
    made.check()
    if made.needed:
        handshake.check_plugin_allowed()
    applying.start(
        Payload(
            version=__version__,
            applier=os.getpid(),
            shims=tuple(decision.shim.id for decision in made.needed),
            consumer_dir=str(made.consumer.package_dir),
            provider_dir=str(made.provider.package_dir),
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
