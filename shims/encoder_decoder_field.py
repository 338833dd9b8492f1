"""Give SchedulerConfig the field is_encoder_decoder, which became required."""

from __future__ import annotations

from types import ModuleType

from eagle3compat.patching import Patcher
from eagle3compat.probes import call_binds
from eagle3compat.shim import GENERATOR, Contract, Patch, Process, Shim


def _install(module: ModuleType, patcher: Patcher) -> None:
    # The route captures decoder layers; an encoder-decoder verifier is refused in the worker.
    patcher.add_argument(module, "SchedulerConfig", "is_encoder_decoder", False)


SHIM = Shim(
    id="encoder-decoder-field",
    title="SchedulerConfig gets is_encoder_decoder",
    contracts=(
        Contract(
            GENERATOR,
            "VllmHiddenStatesGenerator._create_vllm_config",
            "vllm.config.SchedulerConfig",
            "a scheduler config without is_encoder_decoder",
        ),
    ),
    consumers=">=0.3.0,<0.4",
    expected=">=0.12",
    probe=call_binds(GENERATOR, "vllm.config.SchedulerConfig", add=("is_encoder_decoder",)),
    patches=(Patch(GENERATOR, _install),),
    process=Process.PARENT,
    why="A ValidationError says that the field is required.",
    upstream="https://github.com/vllm-project/speculators/pull/225 (follows vLLM 0.12)",
    mended_in="speculators 0.4.0",
    remove_when="speculators 0.3 is no longer supported",
)
