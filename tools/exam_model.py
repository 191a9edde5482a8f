"""Load the model of an exam."""

from __future__ import annotations

import warnings
from typing import Any

import kvant
from kvant.checkpoints import load


def load_float32(name: str | None) -> tuple[Any, Any]:
    """Load a model and its tokenizer, on the CPU, with all products in float32.

    Weights of a GGUF file, such as SmolLM2's, are expanded: products with their codes may round
    activations to integers, and llama.cpp reads the expanded weights.
    """
    model, tokenizer = load(name, device="cpu", dtype="float32")
    with warnings.catch_warnings(action="ignore"):  # they keep their rounded values
        kvant.unpack(model)
    return model, tokenizer
