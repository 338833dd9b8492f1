"""A tiny Kimi-K2.5 checkpoint that real vLLM loads, written in seconds and always the same."""

from __future__ import annotations

from eagle3compat.tiny.checkpoint import write_tiny_kimi
from eagle3compat.tiny.configuration import Variant

__all__ = ["Variant", "write_tiny_kimi"]
