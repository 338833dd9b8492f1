"""Load the verifier's tokenizer with remote code, as its config and its model are."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import CONSTRUCT_030, CONSTRUCT_040
from eagle3compat.patching import Patcher, overlaid
from eagle3compat.probes import known_function
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

_FOUND = Finding(
    Status.NEEDED, "the tokenizer is loaded without trust_remote_code, config and model with it"
)


def _install(module: ModuleType, patcher: Patcher) -> None:
    tokenizers = module.AutoTokenizer

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        # The path is the one that the user named as the verifier.
        return tokenizers.from_pretrained(*args, **{"trust_remote_code": True} | kwargs)

    patcher.replace(module, "AutoTokenizer", overlaid(tokenizers, from_pretrained=from_pretrained))


SHIM = Shim(
    id="tokenizer-remote-code",
    title="tokenizer loaded with trust_remote_code",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator.__init__",
            "transformers.AutoTokenizer.from_pretrained",
            "a tokenizer that ships its own code, as Kimi's does",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=">=0.11",
    probe=known_function(
        GENERATOR,
        "VllmHiddenStatesGenerator.__init__",
        {CONSTRUCT_030: _FOUND, CONSTRUCT_040: _FOUND},
        "AutoTokenizer.from_pretrained",
    ),
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="Without the flag a tokenizer of remote code raises a ValueError.",
    upstream="none: the generator was removed in speculators 0.5.0 before it was reported",
    mended_in="speculators 0.5.0 (the in-process generator is gone)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
)
