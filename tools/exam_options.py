"""Check the options of exams before hours of measurement."""

from __future__ import annotations

from typing import Any

from kvant.generation.decoder import TransformersDecoder
from kvant.probing.divergence import make_stored_prefill_spec
from kvant.spec import split_specs


def parse_formats(model: Any, formats: str) -> list[str]:
    """Split a list of specs; raise for one that the model cannot have."""
    specs = split_specs(formats)
    for spec in specs:
        make_stored_prefill_spec(model, spec)
    return specs


def check_context(decoder: TransformersDecoder, num_tokens: int) -> None:
    """Raise if a model was not made for as many tokens."""
    limit = decoder.max_context
    if limit is not None and num_tokens > limit:
        raise ValueError(f"a context of {num_tokens} tokens: the model has {limit}, give fewer")
