"""Refuse prompts that cannot be computed whole, instead of cutting them without a word."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import GENERATE_030, GENERATE_040
from eagle3compat.errors import InputError
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

_FOUND = Finding(Status.NEEDED, "prompts are cut to max_model_len - 1")


def as_prompts(token_ids: Any) -> list[list[int]]:
    """Token ids of each prompt, from a list of lists, arrays or tensors, or one of two dimensions.

    Raises:
        InputError: it is none of these.
    """
    given = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    prompts = [ids.tolist() if hasattr(ids, "tolist") else ids for ids in given]
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence) or not all(
            hasattr(each, "__index__") for each in prompt
        ):
            raise InputError(
                f"prompt {index}: expected a list of whole numbers, one a token, found "
                f"{reprlib.repr(prompt)}. token_ids is a list of prompts, even for one."
            )
    return prompts


def check_prompts(prompts: Sequence[Sequence[int]], max_model_len: int, vocabulary: int) -> None:
    """Raise ``InputError`` unless every prompt can be computed whole.

    Args:
        prompts: token ids of each prompt.
        max_model_len: the engine's limit in tokens, of which one is for the sampled token.
        vocabulary: number of token ids that the model embeds.
    """
    if not prompts:
        raise InputError("token_ids: expected at least one prompt, found none.")
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < max_model_len:
            raise InputError(
                f"prompt {index}: expected 1 to {max_model_len - 1} tokens (max_model_len "
                f"{max_model_len}, one of them for the sampled token), found {len(prompt)}. "
                "Raise max_model_len, or leave the prompt out: cutting it would be silent."
            )
        outside = [token for token in prompt if not 0 <= token < vocabulary]
        if outside:
            raise InputError(
                f"prompt {index}: expected token ids from 0 to {vocabulary - 1}, found "
                f"{outside[0]}. Was it made with another tokenizer?"
            )


def _install(module: ModuleType, patcher: Patcher) -> None:
    def generate(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        token_ids = kwargs["token_ids"] if "token_ids" in kwargs else args[0]
        prompts = as_prompts(token_ids)
        config = instance.vllm_config.model_config
        check_prompts(prompts, config.max_model_len, config.get_vocab_size())
        # An array has no truth value, which is what the generator asks of all but tensors.
        return wrapped(token_ids if isinstance(token_ids, list) else prompts)

    patcher.wrap(module.VllmHiddenStatesGenerator, "generate", generate)


SHIM = Shim(
    id="whole-prompts",
    title="prompts that cannot be computed whole are refused",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.generate",
            "vllm.v1.core.sched.scheduler.Scheduler.add_request",
            "prompts of 1 to max_model_len - 1 tokens, of the verifier's vocabulary",
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
    why=(
        "A cut prompt's loss mask no longer fits its states, and an empty one has no rows. With "
        "tensor parallelism a token id outside the vocabulary embeds as zeros."
    ),
    upstream="none: the generator was removed in speculators 0.5.0 before it was reported",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    silent=True,
    after=("finished-requests",),
)
