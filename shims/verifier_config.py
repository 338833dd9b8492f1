"""Read the verifier's config with its own code, and the language model's part of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import VERIFIER_PARTS_030, VERIFIER_PARTS_040
from eagle3compat.patching import Patcher, overlaid
from eagle3compat.probes import known_function
from eagle3compat.shim import DRAFT_MODEL, Contract, Finding, Patch, Process, Shim, Stage, Status

_SET_UP = "Eagle3DraftModel._setup_embeddings_and_lm_heads"


def _install(module: ModuleType, patcher: Patcher) -> None:
    configs = module.AutoConfig

    def from_pretrained(name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        # The path is the one that the user named as the verifier.
        options = {"trust_remote_code": True} | kwargs
        config = configs.from_pretrained(name_or_path, *args, **options)
        return getattr(config, "text_config", None) or config

    patcher.replace(module, "AutoConfig", overlaid(configs, from_pretrained=from_pretrained))


SHIM = Shim(
    id="verifier-config",
    title="verifier's config read with its own code, down to its text part",
    contracts=(
        Contract(
            DRAFT_MODEL,
            _SET_UP,
            "transformers.AutoConfig.from_pretrained",
            "hidden size and vocabulary size of a verifier that ships its own config class",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=None,
    probe=known_function(
        DRAFT_MODEL,
        _SET_UP,
        {
            VERIFIER_PARTS_030: Finding(
                Status.NEEDED, "loaded without trust_remote_code, text_config is not looked into"
            ),
            VERIFIER_PARTS_040: Finding(Status.NEEDED, "loaded without trust_remote_code"),
        },
        "AutoConfig.from_pretrained",
    ),
    patches=(Patch(DRAFT_MODEL, _install),),
    process=Process.PARENT,
    why=(
        "Kimi-K2.5's config is remote code, and holds its sizes in text_config: transformers asks "
        "for the flag, and 0.3.0 finds no hidden_size."
    ),
    upstream="none: speculators 0.4.0 reads text_config; the flag was not reported",
    mended_in="no release of speculators 0.3 or 0.4",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    stages=(Stage.TRAINING,),
)
