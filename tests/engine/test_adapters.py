"""Test adapters by request: replies equal those of merged models alone, and no prefix crosses."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.test_engine import generate_alone, make_engine, no_leaks, wait_until_idle
from hf.zoo import build
from kvant.adapters import Adapter
from kvant.checkpoints.pooling import Pooling
from kvant.engine.actions import Decode, Prefill
from kvant.engine.chunk_sizer import CHUNK_TIME_TOLERANCE, ChunkSizer
from kvant.engine.request import Request
from kvant.native import get_library
from kvant.prefixes import Prefixes
from kvant.prefixes.memory import PrefixPools
from kvant.replay import NATIVE_REPLAY
from peft_files import save_adapter
from prefixes.test_prefix_store import open_folder
from prefixes.test_prefixes import assert_no_leaks, make_tokens

pytestmark = pytest.mark.usefixtures(no_leaks.__name__)

TARGETS = {
    "llama": (["q_proj", "v_proj", "down_proj"], ["o_proj", "gate_proj", "lm_head"]),
    "gpt2": (["c_attn", "c_proj"], ["c_fc"]),
    "qwen2": (["q_proj", "k_proj", "v_proj"], ["up_proj"]),
}
NAMES = (None, "a", "b")


class Served:
    """A model, two adapters of it, and the model with each merged."""

    def __init__(self, family: str, folder: Path) -> None:
        self.model = build(family)
        self.paths = {name: folder / name for name in ("a", "b")}
        self.merged = {None: self.model}
        for rank, name, targets in zip((2, 3), self.paths, TARGETS[family], strict=True):
            config = {"r": rank, "lora_alpha": 7, "target_modules": targets}
            config["fan_in_fan_out"] = family == "gpt2"
            self.merged[name] = save_adapter(self.model, self.paths[name], rank, **config)

    def generate_alone(self, name: str | None, prompt: list[int], *args: Any) -> list[int]:
        return generate_alone(self.merged[name], prompt, *args, max_new_tokens=12)


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served("llama", tmp_path)


@pytest.fixture
def immediate_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = NATIVE_REPLAY._replace(num_warmup_forwards=0)
    monkeypatch.setattr("kvant.replay.replayer.NATIVE_REPLAY", at_once)


def submit(engine: Any, prompt: list[int], name: str | None, **options: Any) -> Any:
    options = {"max_new_tokens": 12, "ignore_end": True, "adapter": name} | options
    return engine.submit(prompt, **options)


@pytest.mark.usefixtures(immediate_replay.__name__)
@pytest.mark.parametrize(
    ("family", "spec"),
    [("llama", "raw"), ("llama", "affine8,prefill=stored"), ("gpt2", "raw"), ("qwen2", "raw")],
)
def test_replies_equal_those_of_the_merged_models(family: str, spec: str, tmp_path: Path) -> None:
    """Twelve requests in random order, with a common prefix, for two adapters and the model."""
    served, chance, prefixes = Served(family, tmp_path), random.Random(0), Prefixes()
    names = [*NAMES] * 4
    chance.shuffle(names)
    prompts = [make_tokens(64, 0) + make_tokens(chance.randint(1, 60), n) for n in range(12)]
    with make_engine(
        served.model, spec, adapters=served.paths, max_sequences=5, prefixes=prefixes
    ) as engine:
        streams = [submit(engine, *pair) for pair in zip(prompts, names, strict=True)]
        replies = [list(stream.result().tokens) for stream in streams]
        replayers = engine._worker.batch._replayers
        refusals = {replayer.refusal for replayer in replayers.values()}
        assert engine.stats()["nbytes_adapters"] > 0
        wait_until_idle(engine)
    expected = [served.generate_alone(n, p, spec) for n, p in zip(names, prompts, strict=True)]
    assert replies == expected
    if get_library().functions is not None and family != "gpt2":  # it is never replayed
        assert refusals == {None}
    assert_no_leaks(prefixes)


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
def test_requests_over_rounded_weights(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvant.weights.packing.MIN_PACKED_VALUES", 1)
    prompts = [make_tokens(20, seed) for seed in (0, 0, 0, 1, 1, 1)]
    options: dict[str, Any] = {"adapters": served.paths, "weights": "affine8"}
    with make_engine(served.model, **options) as engine:
        streams = [submit(engine, p, n) for p, n in zip(prompts, [*NAMES] * 2, strict=True)]
        replies = [stream.result().tokens for stream in streams]
        for prompt, name, reply in zip(prompts, [*NAMES] * 2, replies, strict=True):
            assert submit(engine, prompt, name).result().tokens == reply
    assert len({*replies}) == 6  # no name gets the reply of another


def test_prefixes_do_not_cross_in_memory(served: Served) -> None:
    prompt, prefixes, cached = make_tokens(130, 0), Prefixes(), {}
    paths = served.paths | {"copy": served.paths["a"]}
    with make_engine(served.model, adapters=paths, prefixes=prefixes) as engine:
        for name in (*NAMES, *NAMES, "copy"):
            result = submit(engine, prompt, name).result()
            cached.setdefault(name, []).append(result.usage.cached_tokens)
            expected = served.generate_alone("a" if name == "copy" else name, prompt)
            assert list(result.tokens) == expected
        for name in NAMES:
            assert not submit(engine, prompt, name, salt="b").result().usage.cached_tokens
            assert submit(engine, prompt, name, salt="b").result().usage.cached_tokens >= 128
    assert all(counts[0] == 0 and counts[1] >= 128 for counts in map(cached.get, NAMES) if counts)
    assert cached["copy"][0] >= 128  # keyed by content, not by name
    assert_no_leaks(prefixes)


def test_prefixes_do_not_cross_in_a_store(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # prefilling is never faster
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    prompt, store = make_tokens(200, 0), tmp_path / "store"
    for restored_name in NAMES:
        prefixes = Prefixes(store=open_folder(store))
        with make_engine(served.model, adapters=served.paths, prefixes=prefixes) as engine:
            for name in NAMES:
                result = submit(engine, prompt, name).result()
                is_stored = NAMES.index(name) < NAMES.index(restored_name)
                if name == restored_name:  # new in this process; written to the store by it
                    assert (result.usage.cached_tokens, result.usage.restored_tokens) == (0, 0)
                    assert list(result.tokens) == served.generate_alone(name, prompt)
                    break
                assert is_stored and result.usage.restored_tokens >= 128
                assert list(result.tokens) == served.generate_alone(name, prompt)
            prefixes.flush()
        prefixes.close()


def test_a_failed_forward_leaves_no_adapter_active(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, layer = make_tokens(30, 0), served.model.model.layers[1].mlp
    forward, failures = type(layer).forward, []

    def fail(self: Any, rows: Any) -> Any:
        if self is layer and rows.shape[1] == 29:
            failures.append(self)
            raise RuntimeError("out of luck")
        return forward(self, rows)

    monkeypatch.setattr(type(layer), "forward", fail)
    with make_engine(served.model, adapters=served.paths) as engine:
        failed = submit(engine, prompt[:29], "a")
        other = submit(engine, prompt, "a")
        with pytest.raises(RuntimeError, match="out of luck"):
            failed.result()
        assert list(submit(engine, prompt, None).result().tokens) == served.generate_alone(
            None, prompt
        )
        assert list(other.result().tokens) == served.generate_alone("a", prompt)
    assert failures


def test_cancel_ends_one_request_of_an_adapter(served: Served) -> None:
    prompts = [make_tokens(30, seed) for seed in range(4)]
    with make_engine(served.model, adapters=served.paths) as engine:
        cancelled = submit(engine, prompts[0], "a", max_new_tokens=400)
        streams = [submit(engine, p, n) for p, n in zip(prompts[1:], ("a", "b", None), strict=True)]
        next(iter(cancelled))
        cancelled.cancel()
        replies = [list(stream.result().tokens) for stream in streams]
        assert len(cancelled.result().tokens) < 400
        wait_until_idle(engine)
    expected = [
        served.generate_alone(n, p) for p, n in zip(prompts[1:], ("a", "b", None), strict=True)
    ]
    assert replies == expected


def test_swapped_requests_and_embeddings_keep_their_adapter(served: Served) -> None:
    prompts, limit = [make_tokens(60, seed) for seed in range(9)], 160 << 10
    options: dict[str, Any] = {"max_bytes": limit, "overcommit": 3.0, "max_sequences": 9}
    with make_engine(served.model, adapters=served.paths, **options) as engine:
        streams = [
            submit(engine, p, n, max_new_tokens=60)
            for p, n in zip(prompts, [*NAMES] * 3, strict=True)
        ]
        replies = [list(stream.result().tokens)[:12] for stream in streams]
        assert engine.stats()["put_aside"] > 0
        pooled = [engine.embed(prompts[0], Pooling("last"), adapter=n).result() for n in NAMES]
    assert replies == [
        served.generate_alone(n, p) for p, n in zip(prompts, [*NAMES] * 3, strict=True)
    ]
    with torch.no_grad():
        ids = torch.tensor([prompts[0]])
        for name, vector in zip(NAMES, pooled, strict=True):
            expected = served.merged[name].model(ids).last_hidden_state[0, -1]
            torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-3)


def test_unknown_adapter_is_refused_with_the_known_ones(served: Served) -> None:
    for paths, known in ((served.paths, "a, b"), ({}, "none")):
        with (
            make_engine(served.model, adapters=paths) as engine,
            pytest.raises(ValueError, match=f"adapter 'c': unknown; .* adapters: {known}"),
        ):
            submit(engine, [3, 4], "c")


# ---- turns, without a model


def make_requests(adapters: list[Adapter | None]) -> list[Request]:
    requests = [Request(n, 4, 99, adapter=adapter) for n, adapter in enumerate(adapters)]
    for request in requests:
        request.num_computed_tokens, request.is_active = 4, True
    return requests


def test_adapters_take_turns() -> None:
    """Each adapter decodes once a round, with few requests or many, also when one joins."""
    first, second = Adapter("a", {}), Adapter("b", {})
    running, sizer = make_requests([None] * 5 + [first]), ChunkSizer(512)
    waits, most = Counter[Adapter | None](), 0
    for step in range(60):
        if step == 20:
            running = make_requests([None] * 5 + [first] + [second] * 9)
        if step % 7 == 6:  # leaves and joins
            running = [r for r in running if r.adapter is not first] + make_requests([first])
        action = sizer.choose_forward(running, math.inf)
        assert isinstance(action, Decode)
        [adapter] = {request.adapter for request in action.requests}
        assert len(action.requests) == sum(r.adapter is adapter for r in running)
        sizer.record_forward(action, running)
        for other in {request.adapter for request in running}:
            waits[other] = 0 if other is adapter else waits[other] + 1
        most = max(most, *waits.values())
    assert most == 2


def test_prefill_delays_no_adapter_beyond_the_limit() -> None:
    sizer, limit = ChunkSizer(512), 0.25
    for count in (64, 128, 512):
        sizer.record_time(count, 0, 1e-3 * count)
    running = make_requests([None, Adapter("a", {}), Adapter("b", {})])
    prompt = Request(9, 100_000, 1)
    prompt.is_active = True
    delays, num_chunks = Counter[Adapter | None](), 0
    for _ in range(200):
        action = sizer.choose_forward([*running, prompt], limit)
        sizer.record_forward(action, running)
        if isinstance(action, Prefill):
            num_chunks += 1
            prompt.num_computed_tokens += action.count
            for request in running:
                delays[request.adapter] += 1e-3 * action.count
        else:
            assert isinstance(action, Decode)
            delays[action.requests[0].adapter] = 0
        assert max(delays.values()) <= CHUNK_TIME_TOLERANCE * limit + 1e-3
    assert num_chunks >= 40
