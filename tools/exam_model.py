"""Load a model with dense weights."""

from __future__ import annotations

import warnings
from typing import Any

import kvant
from kvant.checkpoints import load


def load_float32(name: str | None) -> tuple[Any, Any]:
    """Load a model and its tokenizer, on the CPU, with all products in float32.

    Products with codes may round activations to integers, and llama.cpp reads expanded weights.
    """
    return load_dense(name, "float32")


def load_dense(name: str | None, dtype: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer, on the CPU; weights of a GGUF file are expanded."""
    model, tokenizer = load(name, device="cpu", dtype=dtype)
    with warnings.catch_warnings(action="ignore"):  # they keep their rounded values
        kvant.unpack(model)
    return model, tokenizer
