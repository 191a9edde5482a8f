"""Old names of public attributes warn and work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvant
from kvant import demo
from kvant.errors import RenamedAttribute


@pytest.fixture(scope="module")
def owners() -> Iterator[list[Any]]:
    model = AutoModelForCausalLM.from_pretrained(demo.PATH)
    tokenizer = AutoTokenizer.from_pretrained(demo.PATH)
    cache = kvant.Cache(1)
    view = cache[0].append(*torch.zeros(2, 1, 1, 1, 64))
    with kvant.Engine(model, tokenizer, pack=False) as engine:
        yield [
            cache,
            kvant.cache_for(model, "raw"),
            kvant.explain(view),
            kvant.Prefixes(),
            engine,
        ]


def test_old_names_warn_and_return_the_new_attribute(owners: list[Any]) -> None:
    for owner in owners:
        renamed = {
            name: value
            for base in type(owner).__mro__
            for name, value in vars(base).items()
            if isinstance(value, RenamedAttribute)
        }
        assert renamed
        for name, value in renamed.items():
            with pytest.warns(DeprecationWarning, match=f"{name} is now {value.new_name}"):
                assert getattr(owner, name) == getattr(owner, value.new_name)
