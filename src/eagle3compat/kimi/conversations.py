"""Conversations as token ids and loss masks, through the checkpoint's own chat template.

An assistant turn is rendered as the engine would produce it: the prompt that asks for it, then what
the model adds. What it adds is found by rendering the conversation up to the turn with and without
it. Turns share a sample as long as the next prompt begins with what came before. A template that
rewrites earlier turns, as those do that drop the thinking of finished answers, so yields several
samples: each holds the history as the engine would see it, and every turn is learnt once.

The mask follows speculators: it marks what an assistant turn adds, but not the marker that ends it.
The trainer shifts the mask with the input: a draft that is given the last marked token learns to
predict the marker behind it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3compat.errors import InputError

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}

OPEN, CLOSE = "<think>", "</think>"
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where data sets keep what an assistant thought; templates read the first."""

# Templates name the same switch differently, and ignore what they do not know.
THINKING_OFF = {"thinking": False, "enable_thinking": False}
THINKING_ON = {"thinking": True, "enable_thinking": True}

_INLINE_THOUGHT = re.compile(rf"\s*{OPEN}(.*?){CLOSE}", re.DOTALL)

THOUGHT_LOST = "the chat template leaves out the thinking of a turn"
FIRST_TURN = "an assistant turn that begins a conversation is not marked: no prompt asks for it"
TURNS_AFTER = "turns after the last assistant turn are left out: they teach nothing"
SEVERAL_SAMPLES = "the chat template rewrites earlier turns: one conversation, several samples"


@dataclass(frozen=True)
class Rendered:
    """One sample of a conversation.

    Attributes:
        input_ids: token ids.
        loss_mask: 0 or 1 for each; 1 for what its assistant turns add, without the end markers.
        turns: numbers of the assistant turns that the mask marks, from 1.
        notes: what the user should know of it; empty where nothing is left out or split.
    """

    input_ids: list[int]
    loss_mask: list[int]
    turns: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Turn:
    """An assistant turn: its number from 1, the prompt that asks for it, and what is added."""

    number: int
    prompt: str
    added: str
    note: str | None = None


def load_tokenizer(model: Path) -> Any:
    """The checkpoint's tokenizer, trusting the remote code of the folder that the user named.

    Raises:
        InputError: there is none that can be loaded, or it has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise InputError(f"--model {model}: its tokenizer cannot be loaded ({error})") from error
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"--model {model}: its tokenizer has no chat template, so conversations cannot be "
            "rendered; give rows of token ids (input_ids, loss_mask)"
        )
    return tokenizer


def normalize_turns(turns: object) -> list[dict[str, Any]]:
    """Bring ShareGPT turns (from, value) and chat messages (role, content) to one form.

    Returns:
        Messages with ``role`` and ``content``; thinking under any of `THOUGHT_KEYS` also under
        ``reasoning_content``; other keys of a turn (tool calls, …) are kept.

    Raises:
        InputError: a turn that is neither, or one whose content is not text.
    """
    if not isinstance(turns, list) or not turns:
        raise InputError("a conversation is a list of turns, and not an empty one")
    return [_normalize_turn(number, turn) for number, turn in enumerate(turns, start=1)]


def _normalize_turn(number: int, turn: object) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise InputError(f"turn {number} is {type(turn).__name__}, expected an object")
    role = turn.get("role", turn.get("from"))
    content = _plain_text(turn.get("content", turn.get("value")))
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(f"turn {number} has role {role!r}, expected one of {', '.join(ROLES)}")
    if content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise InputError(f"turn {number} has content of {type(content).__name__}, expected text")
    # A column of a table has every key in every row, with nothing in it where the row has none.
    rest = {
        key: value
        for key, value in turn.items()
        if value is not None and key not in ("role", "from", "content", "value")
    }
    thought = next((turn[key] for key in THOUGHT_KEYS if turn.get(key)), None)
    if thought is not None:
        if not isinstance(thought, str):
            raise InputError(f"turn {number} has thinking of {type(thought).__name__}, not text")
        rest["reasoning_content"] = thought
    return {"role": ROLES[role], "content": content, **rest}


def _plain_text(content: object) -> object:
    """The text of content that is a list of text parts alone; other content as it is."""
    if isinstance(content, list) and content:
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
            for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    return content


class Renderer:
    """Renders conversations with one tokenizer.

    Args:
        tokenizer: of the checkpoint; its ``apply_chat_template`` is used, and the offsets of its
            tokens where it is a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.has_offsets = bool(getattr(tokenizer, "is_fast", False))
        self._special = [token for token in getattr(tokenizer, "all_special_tokens", ()) if token]
        self._end = self._find_end_marker()
        self._reads_inline_thoughts = self._try_inline_thought()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: object = None) -> list[Rendered]:
        """Render a conversation and mark what its assistant turns add.

        Args:
            messages: from `normalize_turns`.
            tools: passed to the template as it is.

        Returns:
            Samples, one unless the template rewrites earlier turns; each marks at least one token.

        Raises:
            InputError: no assistant turn with content, a template that cannot render it, or a mask
                that cannot be told.
        """
        if not self._reads_inline_thoughts:
            messages = [_with_thought_apart(message) for message in messages]
        turns = self._turns(messages, tools)
        chains = _chains(turns)
        notes = {turn.note for turn in turns if turn.note}
        if len(chains) > 1:
            notes.add(SEVERAL_SAMPLES)
        if messages[0]["role"] == "assistant":
            notes.add(FIRST_TURN)
        if messages[-1]["role"] != "assistant":
            notes.add(TURNS_AFTER)
        samples = [self._sample(chain, tuple(sorted(notes))) for chain in chains]
        samples = [sample for sample in samples if any(sample.loss_mask)]
        if not samples:
            raise InputError("no assistant turn with content, so there is nothing to learn")
        return samples

    def _turns(self, messages: Sequence[Mapping[str, Any]], tools: object) -> list[_Turn]:
        thinks = any(_thought(message) for message in messages)
        modes = ({}, THINKING_ON) if thinks else (THINKING_OFF, {})
        history = [_as_history(number, message) for number, message in enumerate(messages, 1)]
        return [
            self._turn([*history[:position], message], history[position], tools, modes)
            for position, message in enumerate(messages)
            if position and message["role"] == "assistant"
        ]

    def _turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        later: Mapping[str, Any],
        tools: object,
        modes: Sequence[dict[str, bool]],
    ) -> _Turn:
        """The last of the messages, as the engine would be asked for it and would add it.

        Args:
            messages: up to the turn.
            later: the turn as the prompts of later ones have it.
            tools: for the template.
            modes: what to tell the template of thinking, in the order to try.
        """
        number, thought = len(messages), _thought(messages[-1])
        without: _Turn | None = None
        for mode in modes:
            prompt = self._text(messages[:-1], tools, asks=True, mode=mode)
            added = self._added(prompt, messages, tools, mode)
            if added is not None and not _has_calls(added, messages[-1]):
                # Some templates want the arguments of calls as objects.
                added = self._added(prompt, [*messages[:-1], later], tools, mode)
            if added is None:
                continue
            whole = _with_thought(prompt, added, thought)
            if whole is not None:
                return _Turn(number, prompt, whole)
            without = without or _Turn(number, prompt, added, THOUGHT_LOST)
        if without is None:
            raise InputError(
                f"turn {number}: the chat template renders it differently from the prompt that "
                "asks for it, so its loss mask cannot be told; give this row as token ids "
                "(input_ids, loss_mask)"
            )
        return without

    def _added(
        self,
        prompt: str,
        messages: Sequence[Mapping[str, Any]],
        tools: object,
        mode: dict[str, bool],
    ) -> str | None:
        """What the last message adds to its prompt, or None where that cannot be told."""
        whole = self._text(messages, tools, mode=mode)
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        # A finished answer makes some templates drop the thinking that its own prompt still has:
        # without it, the same turn is added to the same end of a prompt.
        plain = [*map(_without_thought, messages[:-1]), messages[-1]]
        if plain[:-1] == list(messages[:-1]):
            return None
        asked = self._text(messages[:-1], tools, asks=True, mode=mode)
        history = self._text(messages[:-1], tools, mode=mode)
        plain_prompt = self._text(plain[:-1], tools, asks=True, mode=mode)
        plain_history = self._text(plain[:-1], tools, mode=mode)
        plain_whole = self._text(plain, tools, mode=mode)
        same_question = asked[len(history) :] == plain_prompt[len(plain_history) :]
        if same_question and asked.startswith(history) and plain_whole.startswith(plain_prompt):
            return plain_whole[len(plain_prompt) :]
        return None

    def _sample(self, chain: Sequence[_Turn], notes: tuple[str, ...]) -> Rendered:
        text = chain[-1].prompt + chain[-1].added
        spans = [
            (len(turn.prompt), len(turn.prompt) + len(self._without_end(turn.added)))
            for turn in chain
        ]
        input_ids, loss_mask = self._tokens(text, [span for span in spans if span[0] < span[1]])
        return Rendered(input_ids, loss_mask, tuple(turn.number for turn in chain), notes)

    def _without_end(self, added: str) -> str:
        if self._end and added.endswith(self._end):
            return added[: -len(self._end)]
        # A turn may end in another marker than an answer does, such as one after tool calls.
        bare = added.rstrip()
        ends = [token for token in self._special if bare.endswith(token)]
        return bare[: -len(max(ends, key=len))] if ends else added

    def _tokens(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Token ids of a text, and the mask of the tokens that lie in the spans, or reach in."""
        if self.has_offsets:
            encoding = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            return list(encoding["input_ids"]), _mask_of(encoding["offset_mapping"], spans)
        input_ids, loss_mask, end = list[int](), list[int](), 0
        for start, stop in (*spans, (len(text), len(text))):
            for piece, marked in ((text[end:start], 0), (text[start:stop], 1)):
                tokens = self._encode(piece) if piece else []
                input_ids += tokens
                loss_mask += [marked] * len(tokens)
            end = stop
        if input_ids != self._encode(text):
            raise InputError(
                "a token lies across the border of an assistant turn, and this tokenizer does not "
                "tell where its tokens lie, so the loss mask cannot be told; give this row as "
                "token ids (input_ids, loss_mask)"
            )
        return input_ids, loss_mask

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: object,
        *,
        asks: bool = False,
        mode: Mapping[str, bool],
    ) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=asks, **mode
            )
        except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            raise InputError(
                f"the chat template cannot render the first {len(messages)} turns ({error})"
            ) from error
        return str(text)

    def _find_end_marker(self) -> str:
        """What the template puts behind an answer, or nothing where it cannot be told."""
        question, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": "~2~"}
        try:
            text = self._text([question, answer], None, mode=THINKING_OFF)
        except InputError:
            return ""
        return text.rpartition(answer["content"])[2] if answer["content"] in text else ""

    def _try_inline_thought(self) -> bool:
        """Whether a thought at the beginning of the content is rendered as one."""
        question = {"role": "user", "content": "1"}
        answer = {"role": "assistant", "content": f"{OPEN}2{CLOSE}3"}
        try:
            prompt = self._text([question], None, asks=True, mode={})
            whole = self._text([question, answer], None, mode={})
        except InputError:
            return False
        opened = prompt.rstrip().endswith(OPEN)
        return whole.startswith(prompt) and opened + whole[len(prompt) :].count(OPEN) == 1


def _chains(turns: Sequence[_Turn]) -> list[list[_Turn]]:
    """Turns that share a sample: each prompt begins with all that the one before came to."""
    chains: list[list[_Turn]] = []
    for turn in turns:
        if chains and turn.prompt.startswith(chains[-1][-1].prompt + chains[-1][-1].added):
            chains[-1].append(turn)
        else:
            chains.append([turn])
    return chains


def _as_history(number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A turn as later prompts have it: vLLM reads the arguments of tool calls before it renders.

    (``vllm/entrypoints/chat_utils.py``, ``_postprocess_messages``.)
    """
    if not message.get("tool_calls"):
        return message
    try:
        calls = [
            {**each, "function": {**each["function"], "arguments": _arguments(each["function"])}}
            for each in message["tool_calls"]
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"turn {number} has tool calls that vLLM would refuse: expected a function with a name "
            f"and JSON arguments each ({error!r})"
        ) from error
    return {**message, "tool_calls": calls}


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    return json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}


def _has_calls(added: str, message: Mapping[str, Any]) -> bool:
    """Whether what the model wrote as arguments of its calls is rendered as it was written."""
    written = [each["function"].get("arguments") for each in message.get("tool_calls") or ()]
    return all(
        text in added and json.dumps(text) not in added
        if isinstance(text, str) and text
        else isinstance(text, Mapping)
        for text in written
    )


def _mask_of(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    mask = [0] * len(offsets)
    ends = [end for _, end in offsets]
    for start, stop in spans:
        for position in range(bisect_right(ends, start), len(offsets)):
            if offsets[position][0] >= stop:
                break
            mask[position] = 1
    return mask


def _thought(message: Mapping[str, Any]) -> str:
    """What the assistant thought, apart from its content or at the beginning of it."""
    if message["role"] != "assistant":
        return ""
    inline = _INLINE_THOUGHT.match(message["content"])
    thought = message.get("reasoning_content") or (inline[1] if inline else "")
    return thought if thought.strip() else ""


def _with_thought(prompt: str, added: str, thought: str) -> str | None:
    """What the engine would add: the thought is put in where the template leaves it empty.

    None where the template leaves it out without a place for it.
    """
    if not thought or thought.strip() in added.split(CLOSE)[0]:
        return added
    if prompt.endswith(OPEN) and added.startswith(CLOSE):
        return thought + added
    if added.startswith(OPEN + CLOSE):
        return OPEN + thought + added[len(OPEN) :]
    return None


def _with_thought_apart(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with a thought at the beginning of its content under ``reasoning_content``."""
    inline = _INLINE_THOUGHT.match(message["content"]) if message["role"] == "assistant" else None
    if inline is None or message.get("reasoning_content"):
        return message
    return {
        **message,
        "reasoning_content": inline[1],
        "content": message["content"][inline.end() :],
    }


def _without_thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    apart = _with_thought_apart(message)
    return {key: value for key, value in apart.items() if key not in THOUGHT_KEYS}
