"""Chat templates of several habits, and tokenizers that render them."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

KIMI = (resources.files("eagle3compat.tiny") / "remote" / "chat_template.jinja").read_text()

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# ChatML without any thought of thinking.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: thinking is kept behind the last question alone, inline or apart, and an empty one is
# put there; the prompt does not open it.
QWEN3 = """\
{%- set ns = namespace(question=-1) -%}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{%- set ns.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
    {%- set thought = m.reasoning_content or '' -%}
    {%- set content = m.content -%}
    {%- if m.role == 'assistant' and not thought and '</think>' in content -%}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>' ~ m.role ~ '\\n' -}}
    {%- if m.role == 'assistant' and loop.index0 > ns.question -%}
        {{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""
# Rewrites the last answer too: what is served is not what is rendered.
RAVING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.role == 'user' else 'x' }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>begin:{% endif %}"
)
# Another end marker after tool calls, as Llama's.
TWO_ENDS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}<|eom|>{% else %}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PICKY = "{{ raise_exception('no') if messages[0].role != 'user' }}" + PLAIN


def fill(
    template: str, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **values: Any
) -> str:
    """A template, filled as transformers does it."""
    import jinja2

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    if not messages:
        raise IndexError("list index out of range")
    return _compiled(template).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        raise_exception=raise_exception,
        **values,
    )


@cache
def _compiled(template: str) -> Any:
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template)


class CharacterTokenizer:
    """One token a character; a Python tokenizer without offsets, as Kimi's is."""

    is_fast = False
    all_special_tokens = ("<|eom|>", "<|eot|>", "<|im_end|>")

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool, **values: Any
    ) -> str:
        assert not tokenize
        return fill(self.chat_template, messages, **values)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


class PairTokenizer(CharacterTokenizer):
    """Joins a letter with the bracket before it, so that a token lies across a turn's border."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        joined = text.replace(">h", "\u2192")
        return super().__call__(joined)
