"""Tokenizer of the tiny Kimi-K2.5: byte-pair encoding by tiktoken, chat markers on top.

Like the real one it is a Python tokenizer: it has no offsets and is no fast tokenizer.
"""

import base64
import shutil
from pathlib import Path

import tiktoken
from transformers import PreTrainedTokenizer

SPECIAL_TOKEN_COUNT = 64

# Words with the space before them, numbers of up to three digits, runs of marks, line ends, spaces.
PATTERN = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class TikTokenTokenizer(PreTrainedTokenizer):
    """Byte-level tokens. In a token's text each byte stands as the character 256 above it."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        self.vocab_file = vocab_file
        ranks = _read_ranks(vocab_file)
        specials = _special_tokens(len(ranks), added_tokens_decoder or {})
        self._encoding = tiktoken.Encoding(
            name="tiny-kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        self._token_to_id = {_text(token): rank for token, rank in ranks.items()}
        self._token_to_id.update(specials)
        self._id_to_token = {rank: token for token, rank in self._token_to_id.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder or {}, **kwargs)

    @property
    def vocab_size(self):
        return len(self._token_to_id)

    def get_vocab(self):
        return dict(self._token_to_id)

    def _tokenize(self, text, **kwargs):
        return [self._id_to_token[rank] for rank in self._encoding.encode_ordinary(text)]

    def _convert_token_to_id(self, token):
        return self._token_to_id.get(token, self._token_to_id["[UNK]"])

    def _convert_id_to_token(self, index):
        return self._id_to_token.get(index, "[UNK]")

    def convert_tokens_to_string(self, tokens):
        ranks = [self._convert_token_to_id(token) for token in tokens]
        return self._encoding.decode(ranks, errors="replace")

    def _decode(self, token_ids, skip_special_tokens=False, **kwargs):
        # Overridden because the inherited one puts spaces round the chat markers.
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return self._encoding.decode([i for i in ids if i not in skipped], errors="replace")

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return list(token_ids_0) + list(token_ids_1 or [])

    def save_vocabulary(self, save_directory, filename_prefix=None):
        name = "tiktoken.model" if filename_prefix is None else f"{filename_prefix}-tiktoken.model"
        target = Path(save_directory) / name
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)


def _read_ranks(vocab_file):
    ranks = {}
    for line in Path(vocab_file).read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return ranks


def _special_tokens(first, added_tokens_decoder):
    """Names all special ids: those in the tokenizer's configuration, and the reserved rest."""
    named = {int(index): str(token) for index, token in added_tokens_decoder.items()}
    return {
        named.get(index, f"<|reserved_token_{index}|>"): index
        for index in range(first, first + SPECIAL_TOKEN_COUNT)
    }


def _text(token):
    return "".join(chr(0x100 + byte) for byte in token)
