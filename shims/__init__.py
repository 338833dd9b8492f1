"""Repairs, one module each; their records are documentation, tests and plan at once."""
