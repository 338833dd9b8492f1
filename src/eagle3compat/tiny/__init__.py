"""A tiny Kimi-K2.5 checkpoint that real vLLM loads."""
