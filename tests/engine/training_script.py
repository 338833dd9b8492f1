"""A training script as people write them, on speculators' own classes: nothing of our driver.

``python training_script.py CHECKPOINT SAMPLES SAVE OUT.json`` trains one epoch, takes the run up
for a second one, and writes what it saw to OUT.json: what was raised, or figures.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import eagle3compat

LENGTH = 128


def main(checkpoint: str, samples: str, save: str, out: str) -> None:
    eagle3compat.apply(training_only=True)
    try:
        seen = train(Path(checkpoint), Path(samples), Path(save))
    except Exception:  # noqa: BLE001 (what is raised is the result)
        seen = {"raised": traceback.format_exc()[-3000:]}
    Path(out).write_text(json.dumps(seen))


def train(checkpoint: Path, samples: Path, save: Path) -> dict[str, Any]:
    import torch

    draft, told = make_draft(checkpoint)
    rates = []
    for epochs in (1, 2):
        trainer = make_trainer(draft, samples, save, epochs)
        rates.append(trainer.opt.param_groups[0]["lr"])
        trainer.run_training()
    loaded = torch.load(sorted(samples.glob("data_*.pt"))[0], weights_only=True)
    return {
        "rates": rates,
        "left_at": trainer.scheduler.base_lrs[0]
        * trainer.scheduler.lr_lambdas[0](steps_of(trainer)),
        "targets": targets(draft, loaded["hidden_states"][-1]),
        "input_ids": loaded["input_ids"].tolist(),
        "config": json.loads((save / "1" / "config.json").read_text()),
        "told": told,
    }


def steps_of(trainer: Any) -> int:
    """Steps of the first epoch."""
    trainer.train_loader.batch_sampler.set_epoch(0)
    return len(trainer.train_loader)


def make_draft(checkpoint: Path) -> tuple[Any, list[str]]:
    import torch
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        hidden_size=128, intermediate_size=256, vocab_size=384, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-5,
    )  # fmt: skip
    layer._attn_implementation = "simple_flex_attention"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=384,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=2)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=str(checkpoint), architectures=["LlamaForCausalLM"]
            ),
        ),
    )
    every = torch.ones(384, dtype=torch.bool)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        draft = Eagle3DraftModel(config, t2d=every, d2t=torch.zeros(384, dtype=torch.long))
    return draft, [str(each.message) for each in told]


def make_trainer(draft: Any, samples: Path, save: Path, epochs: int) -> Any:
    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.trainer import Trainer, TrainerConfig
    from torch.utils.data import DataLoader

    data = Eagle3SampleFileDataset(max_len=LENGTH, datapath=str(samples))
    sampler = MultipackDistributedBatchSamplerV2(LENGTH, data.approx_lengths, 1, 0)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=create_collate_fn(LENGTH))
    options = {"ttt_steps": 2}
    config = TrainerConfig(
        lr=1e-3,
        num_epochs=epochs,
        save_path=str(save),
        resume_from_checkpoint=True,
        train_call_kwargs=options,
        val_call_kwargs=options,
        scheduler_warmup_steps=1,
        scheduler_total_steps=100,
    )
    return Trainer(draft, config, loader)


def targets(draft: Any, states: Any) -> list[int]:
    """The tokens that the draft is to predict for a sample, as its forward pass makes them."""
    import torch

    caught: list[Any] = []
    hook = draft.verifier_lm_head.register_forward_hook(
        lambda module, inputs, output: caught.append(output)
    )
    size = states.shape[0]
    padded = torch.nn.functional.pad(states, (0, 0, 0, LENGTH - size)).unsqueeze(0)
    with torch.no_grad():
        draft(
            hidden_states=torch.zeros(1, LENGTH, 3 * states.shape[1]),
            input_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            loss_mask=torch.ones(1, LENGTH, dtype=torch.long),
            verifier_last_hidden_states=padded,
            ttt_steps=1,
        )
    hook.remove()
    tokens: list[int] = caught[0][0, :size].argmax(-1).tolist()
    return tokens


if __name__ == "__main__":
    main(*sys.argv[1:])
