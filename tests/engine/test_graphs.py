"""Batches from forwards that are captured once: for some numbers of sequences, and filled up."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest

from attention.kernels import needed
from engine.test_engine import alone, engine_for, finished, nothing_is_left, prompts
from hf.graphs import traced
from hf.zoo import build
from kvant.engine.batch import max_idle, pad_batch_size
from kvant.generation import TransformersDecoder

pytestmark = [
    needed,
    pytest.mark.usefixtures("pages_as_on_a_gpu", nothing_is_left.__name__),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, of NaN and infinity
]
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sequences of every forward that was captured."""
    sizes = []

    def capture(forward: Any, ids: Any, lengths: Any) -> Any:
        sizes.append(len(ids))
        return traced(forward, ids, lengths)

    monkeypatch.setattr(
        "kvant.engine.engine.make_decoder",
        lambda model: TransformersDecoder(model, capture=capture),
    )
    return sizes


@pytest.mark.parametrize(
    "spec", ["raw", pytest.param("affine8,window=16,sinks=2", marks=pytest.mark.laws)]
)
def test_sequences_come_and_go_and_graphs_stay(captured: list[int], spec: str) -> None:
    model, asked = build("llama", **SMALL), prompts(6, seed=2, longest=12)
    counts = [9, 3, 9, 4, 7, 5]
    with engine_for(model, spec, max_sequences=3) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=n, ignore_end=True)
            for prompt, n in zip(asked, counts, strict=True)
        ]
        found = [list(stream.result().tokens) for stream in streams]
        finished(engine)
    assert set(captured) <= {1, 2, 4} and 4 in captured
    assert len(captured) <= 6, "a graph is captured anew for whoever comes"
    for prompt, n, tokens in zip(asked, counts, found, strict=True):
        assert tokens == alone(model, prompt, spec, max_new_tokens=n)


def test_a_batch_that_dies_leaves_no_idle_sequence(captured: list[int]) -> None:
    model, asked = build("llama", **SMALL), prompts(3, seed=3, longest=9)
    whole, died = model.forward, []

    @wraps(whole)
    def dying(*args: Any, **kwargs: Any) -> Any:
        if len(kwargs["input_ids"]) > 1 and len(died) < 2:
            died.append(kwargs["input_ids"])
            raise RuntimeError("no memory")
        return whole(*args, **kwargs)

    model.forward = dying
    with engine_for(model, "raw", max_sequences=3) as engine:
        streams = [engine.submit(p, max_new_tokens=6, ignore_end=True) for p in asked]
        found = [list(stream.result().tokens) for stream in streams]
        finished(engine)
    assert died
    del model.forward
    assert found == [alone(model, prompt, max_new_tokens=6) for prompt in asked]


def test_a_model_without_graphs_is_not_filled_up(
    captured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked, sizes = build("falcon"), prompts(3, seed=4, longest=9), []
    rows = TransformersDecoder.compute_batch_logits

    def counted(decoder: TransformersDecoder, tokens: list[int], *given: Any) -> Any:
        sizes.append(len(tokens))
        return rows(decoder, tokens, *given)

    monkeypatch.setattr(TransformersDecoder, "compute_batch_logits", counted)
    with engine_for(model, "raw", max_sequences=3) as engine:
        streams = [engine.submit(p, max_new_tokens=6, ignore_end=True) for p in asked]
        found = [list(stream.result().tokens) for stream in streams]
        finished(engine)
    monkeypatch.undo()
    assert sizes.count(4) <= 1 and not captured  # one was asked whether it can be
    assert found == [alone(model, prompt, max_new_tokens=6) for prompt in asked]


def test_idle_sequences_have_room() -> None:
    assert [pad_batch_size(n) for n in (1, 2, 3, 5, 9, 16, 17, 33)] == [1, 2, 4, 8, 16, 16, 32, 48]
    assert [max_idle(n) for n in (1, 2, 3, 8, 9, 64)] == [1, 1, 2, 4, 8, 16]
