"""A backend of Triton for the CPU, in name: with ``TRITON_INTERPRET=1`` nothing is compiled.

vLLM's model runner V2 asks for Triton with such a backend, and PyPI has none. Triton's own
interpreter runs the kernels.
"""
