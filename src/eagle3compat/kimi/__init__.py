"""The Kimi-K2.5 pipeline, on top of the public face alone."""
