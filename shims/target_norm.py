"""Lead the verifier's last state through its final norm before the head makes targets of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from eagle3compat.consumer_texts import (
    DRAFT_FORWARD_030,
    DRAFT_FORWARD_040,
    VERIFIER_PARTS_030,
    VERIFIER_PARTS_040,
)
from eagle3compat.errors import Refusal
from eagle3compat.patching import Patcher
from eagle3compat.probes import all_of, known_function
from eagle3compat.shim import DRAFT_MODEL, Contract, Finding, Patch, Process, Shim, Stage, Status
from eagle3compat.verifier_parts import FINAL_NORM, text_part

_FORWARD = "Eagle3DraftModel.forward"
_STATES = "verifier_last_hidden_states"
_POSITION = 5
"""Where ``forward`` takes the states, counted without ``self``."""
_BUFFER = "_eagle3compat_final_norm"


def _install(module: ModuleType, patcher: Patcher) -> None:
    draft = module.Eagle3DraftModel

    def set_up(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        checkpoint = (args[0] if args else kwargs["config"]).name_or_path
        found = module.load_model_layers([FINAL_NORM], checkpoint)
        if FINAL_NORM not in found:
            raise Refusal(
                checkpoint,
                f"a tensor {FINAL_NORM}, alone or below a prefix",
                "none",
                "Without the verifier's final norm a draft would learn wrong targets.",
            )
        config, _ = module.PretrainedConfig.get_config_dict(checkpoint)
        # Not persistent: a checkpoint of the draft stays what speculators makes it.
        weight = found[FINAL_NORM].to(instance.embed_tokens.weight.dtype)
        instance.register_buffer(_BUFFER, weight, persistent=False)
        instance._eagle3compat_norm_epsilon = text_part(config)["rms_norm_eps"]

    def forward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if len(args) > _POSITION:
            states = _normalised(module.torch, instance, args[_POSITION])
            args = (*args[:_POSITION], states, *args[_POSITION + 1 :])
        elif kwargs.get(_STATES) is not None:
            kwargs = kwargs | {_STATES: _normalised(module.torch, instance, kwargs[_STATES])}
        return wrapped(*args, **kwargs)

    patcher.wrap(draft, "_setup_embeddings_and_lm_heads", set_up)
    patcher.wrap(draft, "forward", forward)


def _normalised(torch: Any, draft: Any, states: Any) -> Any:
    """The verifier's RMS norm of its last states [1, tokens, hidden size], computed in float32."""
    if states is None:
        return None
    weight = getattr(draft, _BUFFER)
    with torch.no_grad():
        exact = torch.nn.functional.rms_norm(
            states.float(), weight.shape, weight.float(), draft._eagle3compat_norm_epsilon
        )
    return exact.to(states.dtype)


SHIM = Shim(
    id="target-norm",
    title="targets made of the normalised last state",
    contracts=(
        Contract(
            DRAFT_MODEL,
            _FORWARD,
            "transformers.models.llama.modeling_llama.LlamaRMSNorm",
            "the verifier's logits, which its head makes of the state behind the final norm",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=None,
    probe=all_of(
        known_function(
            DRAFT_MODEL,
            _FORWARD,
            {
                DRAFT_FORWARD_030: Finding(
                    Status.NEEDED, "the head is fed the stored state, which is before the norm"
                ),
                DRAFT_FORWARD_040: Finding(Status.NOT_NEEDED, "verifier_norm comes before it"),
            },
            "targets = self.verifier_lm_head(",
        ),
        known_function(
            DRAFT_MODEL,
            "Eagle3DraftModel._setup_embeddings_and_lm_heads",
            {
                VERIFIER_PARTS_030: Finding(Status.NEEDED, "no norm is loaded"),
                VERIFIER_PARTS_040: Finding(Status.NOT_NEEDED, "the norm is loaded"),
            },
            "load_model_layers(",
        ),
    ),
    patches=(Patch(DRAFT_MODEL, _install),),
    process=Process.PARENT,
    why=(
        "What extraction stores of the last layer is the residual stream before the final norm; "
        "the verifier's head makes other logits of it, and a draft learns those."
    ),
    upstream="none: speculators 0.4.0 added verifier_norm",
    mended_in="speculators 0.4.0",
    remove_when="speculators 0.3 is no longer supported",
    silent=True,
    after=("compiled-forward",),
    stages=(Stage.TRAINING,),
)
