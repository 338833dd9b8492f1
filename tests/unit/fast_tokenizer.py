"""A small fast tokenizer, whose tokens have offsets, with a chat template."""

from __future__ import annotations

from typing import Any

MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
TEXT = (
    "user assistant system tool hello world, what is the answer? The answer is in the question.",
    "Moonlight and the sea; one, two, three. 1 2 3 10 100 Paris is the capital of France.",
)


def fast_tokenizer(template: str) -> Any:
    """Byte-level byte-pair encoding, learnt from `TEXT`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", *MARKERS[:2]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens(list(MARKERS[2:]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        chat_template=template,
    )
