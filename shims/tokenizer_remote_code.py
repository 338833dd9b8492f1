"""Load the verifier's tokenizer with remote code, as its config and its model are."""

from __future__ import annotations

from types import ModuleType

import wrapt

from eagle3compat.consumer_texts import CONSTRUCT_030, CONSTRUCT_040
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import GENERATOR, Contract, Finding, Patch, Process, Shim, Status

_FOUND = Finding(
    Status.NEEDED, "the tokenizer is loaded without trust_remote_code, config and model with it"
)


class TrustingTokenizers(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """transformers' AutoTokenizer, for the path that the user named as the verifier."""

    def from_pretrained(self, *args: object, **kwargs: object) -> object:
        return self.__wrapped__.from_pretrained(*args, **{"trust_remote_code": True} | kwargs)


def _install(module: ModuleType, patcher: Patcher) -> None:
    patcher.replace(module, "AutoTokenizer", TrustingTokenizers(module.AutoTokenizer))


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
