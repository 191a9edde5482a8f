"""kvant: the KV cache of a language model as a component of its own."""

__version__ = "0.1.0"
