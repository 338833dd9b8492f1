"""Refuse prompts that cannot be computed whole, instead of cutting them without a word."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import GENERATE_030, GENERATE_040
from eagle3compat.errors import InputError
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

_FOUND = Finding(Status.NEEDED, "prompts are cut to max_model_len - 1")


def check_prompts(lengths: list[int], max_model_len: int) -> None:
    """Raise ``InputError`` unless every prompt has 1 to ``max_model_len`` - 1 tokens.

    Args:
        lengths: tokens of each prompt.
        max_model_len: the engine's limit in tokens, of which one is for the sampled token.
    """
    if not lengths:
        raise InputError("token_ids: expected at least one prompt, found none.")
    for index, length in enumerate(lengths):
        if not 0 < length < max_model_len:
            raise InputError(
                f"prompt {index}: expected 1 to {max_model_len - 1} tokens (max_model_len "
                f"{max_model_len}, one of them for the sampled token), found {length}. "
                "Raise max_model_len, or leave the prompt out: cutting it would be silent."
            )


def _install(module: ModuleType, patcher: Patcher) -> None:
    def generate(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        token_ids = kwargs["token_ids"] if "token_ids" in kwargs else args[0]
        limit = instance.vllm_config.model_config.max_model_len
        check_prompts([len(ids) for ids in token_ids], limit)
        return wrapped(*args, **kwargs)

    patcher.wrap(module.VllmHiddenStatesGenerator, "generate", generate)


SHIM = Shim(
    id="prompt-length",
    title="over-long and empty prompts are refused, not cut",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.generate",
            "vllm.v1.core.sched.scheduler.Scheduler.add_request",
            "prompts of 1 to max_model_len - 1 tokens",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=known_function(
        GENERATOR,
        "VllmHiddenStatesGenerator.generate",
        {GENERATE_030: _FOUND, GENERATE_040: _FOUND},
        "ids[:max_len]",
    ),
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="A cut prompt's loss mask no longer fits its states; an empty one has no rows.",
    upstream="none: the generator was removed in speculators 0.5.0 before it was reported",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    silent=True,
    after=("finished-requests",),
)
