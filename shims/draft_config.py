"""Save with a draft which verifier it is for, and which states vLLM is to feed it."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import DRAFT_030, DRAFT_040
from eagle3compat.patching import Patcher
from eagle3compat.probes import known_function
from eagle3compat.shim import DRAFT_MODEL, Contract, Finding, Patch, Process, Shim, Stage, Status
from eagle3compat.verifier_parts import default_layers, served_layer_ids, text_part

_CONSTRUCT = "Eagle3DraftModel.__init__"
_FOUND = Finding(Status.NEEDED, "the config is saved as it was made, without the layers' ids")


def _install(module: ModuleType, patcher: Patcher) -> None:
    def construct(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        config = instance.config
        verifier = config.speculators_config.verifier
        checkpoint, _ = module.PretrainedConfig.get_config_dict(verifier.name_or_path)
        if checkpoint.get("architectures"):
            verifier.architectures = checkpoint["architectures"]
        if config.eagle_aux_hidden_state_layer_ids is None:
            extracted = default_layers(text_part(checkpoint)["num_hidden_layers"])
            config.eagle_aux_hidden_state_layer_ids = served_layer_ids(extracted)
            warnings.warn(
                "the draft's config has no eagle_aux_hidden_state_layer_ids: taken to be "
                f"{config.eagle_aux_hidden_state_layer_ids}, vLLM's ids for the states of the "
                f"layers {list(extracted)} that speculators extracts by default. Where others "
                "were extracted, give the config their ids plus one.",
                stacklevel=3,
            )

    patcher.wrap(module.Eagle3DraftModel, "__init__", construct)


SHIM = Shim(
    id="draft-config",
    title="the draft's config names its verifier and the layers that feed it",
    contracts=(
        Contract(
            DRAFT_MODEL,
            _CONSTRUCT,
            "transformers.PretrainedConfig.get_config_dict",
            "the verifier's architecture and its number of layers",
        ),
    ),
    consumers=">=0.3.0,<0.5",
    expected=None,
    probe=known_function(
        DRAFT_MODEL,
        _CONSTRUCT,
        {DRAFT_030: _FOUND, DRAFT_040: _FOUND},
        "config.speculators_config.verifier",
    ),
    patches=(Patch(DRAFT_MODEL, _install),),
    process=Process.PARENT,
    why=(
        "Without ids vLLM feeds the draft the input of the layers whose output it was trained on: "
        "states of one layer earlier. The verifier is saved as a LlamaForCausalLM."
    ),
    upstream="none: speculators 0.5.0 extracts by vLLM's own ids",
    mended_in="speculators 0.5.0 (extraction counts as serving does)",
    remove_when="speculators 0.3 and 0.4 are no longer supported",
    silent=True,
    stages=(Stage.TRAINING,),
)
