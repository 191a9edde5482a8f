"""Test common prefixes: prefilled once, with the results of a cold run, without leaks."""

from __future__ import annotations

import gc
import random
from itertools import product
from typing import Any

import pytest
import torch

import kvant
from generation.speakers import Numbers
from hf.zoo import FAMILIES, build
from kvant.cache.reports import measure_pools
from kvant.generation import TransformersDecoder
from kvant.generation.prefiller import Prefiller
from kvant.hf import TransformersCache
from kvant.prefixes import Prefixes
from kvant.prefixes.keys import make_page_key
from laws.cases import FORMATS
from thin import thin_rows

VOCABULARY = 128
FOREIGN = ("deepseek_v32", "mllama")  # transformers stores the state of some of their layers
FEW = ("llama", "gemma3", "falcon_h1", "mamba", "llama4", "deepseek_v3", "qwen3_next")
DECODERS = [name for name, family in FAMILIES.items() if family.kind != "encoder-decoder"]


def make_tokens(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(count)]


def generate_tokens(model: Any, prompt: list[int], spec: str = "raw", **options: Any) -> list[int]:
    options = {"max_new_tokens": 6, "ignore_end": True} | options
    return [
        step.token for step in kvant.generate(model, Numbers(), prompt, kv_cache=spec, **options)
    ]


def family_params() -> list[Any]:
    return [pytest.param(name, marks=() if name in FEW else pytest.mark.laws) for name in DECODERS]


def assert_no_leaks(prefixes: Prefixes) -> None:
    """Assert that no page has a holder after all prefixes are released."""
    homes = [pools.cache for pools in prefixes.memory if pools.cache is not None]
    for home in homes:
        home.state.pools.check()
    prefixes.clear()
    gc.collect()
    for home in homes:
        home.state.pools.check()
        assert measure_pools(home.states)["nbytes_held"] == 0


@pytest.mark.parametrize("name", family_params())
def test_hit_gives_the_tokens_of_a_cold_run(name: str) -> None:
    """From the third prompt on: the second one creates the branch point."""
    model, prefixes = build(name), Prefixes()
    shared = make_tokens(150, seed=0)
    for number in range(4):
        prompt = shared + make_tokens(20 + 9 * number, seed=1 + number)
        before = prefixes.stats()["tokens_hit"]
        assert generate_tokens(model, prompt, prefixes=prefixes) == generate_tokens(model, prompt)
        hit = prefixes.stats()["tokens_hit"] - before
        if (
            number >= 2
            and name not in FOREIGN
            and TransformersDecoder(model).supports_chunked_prefill
        ):
            assert hit >= 128, f"{hit} tokens of a prefix of 150"
    assert_no_leaks(prefixes)


SPECS = [
    "affine8,prefill=stored",
    "affine4,prefill=stored",
    "turbo4v4,prefill=stored,tail=7",
    "fp8,window=70,sinks=3,prefill=stored",
    "affine6,page=128,prefill=stored",
    "affine8,select=2:0,prefill=stored",
    "affine8,sinks=4,prefill=stored",
]


@pytest.mark.parametrize("spec", SPECS)
def test_hits_work_in_every_format(spec: str) -> None:
    model, prefixes = build("llama"), Prefixes()
    shared = make_tokens(300, seed=0)
    for number in range(4):
        prompt = shared + make_tokens(20 + 9 * number, seed=1 + number)
        before = prefixes.stats()["tokens_hit"]
        assert generate_tokens(model, prompt, spec, prefixes=prefixes) == generate_tokens(
            model, prompt, spec
        )
        if number >= 2:
            assert prefixes.stats()["tokens_hit"] - before >= 256
    assert_no_leaks(prefixes)


EXACT = ("llama", "falcon_h1", "gemma3", "qwen3_next", "llama4")  # used without kvant.attach
WINDOWS = ("", "sinks=3", "window=70,sinks=4", "window=200")


@pytest.mark.usefixtures("foreign_codec")
@pytest.mark.parametrize(("name", "codec", "window"), thin_rows(product(EXACT, FORMATS, WINDOWS)))
def test_exact_hits_have_the_bits_of_a_cold_run(name: str, codec: str, window: str) -> None:
    model, spec = build(name), ",".join(filter(None, (codec, window, "prefill=stored")))
    decoder, shared = TransformersDecoder(model), make_tokens(1100, seed=0)

    def logits(prompt: list[int], prefixes: Prefixes) -> torch.Tensor:
        cache = decoder.make_cache(spec)
        reader = Prefiller(decoder, cache, prefixes=prefixes.open_namespace(model, cache))
        logits = reader.prefill(prompt)
        for token in make_tokens(4, seed=9):  # tokens of a reply, whose pages belong to no prompt
            prompt = [*prompt, token]
            reader.compute_next_logits(prompt)
        reader.insert_prefix()
        return logits

    warm = Prefixes(exact=True)
    for number in range(3):
        prompt = shared + make_tokens(30, seed=1 + number)
        assert torch.equal(logits(prompt, warm), logits(prompt, Prefixes(exact=True)))
    assert warm.stats()["tokens_hit"] >= 1024
    with pytest.raises(ValueError, match="prefill=stored"):
        Prefixes(exact=True).open_namespace(model, decoder.make_cache("affine8"))


def test_shared_pages_never_change() -> None:
    model, prefixes, chance = build("llama"), Prefixes(), random.Random(3)
    texts = [make_tokens(70 * n + 9, seed=n % 3) for n in range(1, 5)]
    calls: dict[int, tuple[TransformersCache, list[torch.Tensor]]] = {}
    for turn in range(24):
        prompt = chance.choice(texts)[: chance.randrange(60, 300)] + make_tokens(
            chance.randrange(9), turn
        )
        steps = kvant.generate(
            model,
            Numbers(),
            prompt,
            kv_cache="affine8,tail=3",
            max_new_tokens=chance.randrange(1, 70),
            ignore_end=True,
            prefixes=prefixes,
        )
        for _ in range(chance.randrange(1, 9)):
            next(steps, None)
        del steps  # ends it here
        if chance.random() < 0.3:
            prefixes.evict(chance.randrange(1, 100_000))
        for node in (entry for pools in prefixes.memory for entry in pools):
            rows = [layer.read()[0].clone() for layer in node.cache.states]
            before = calls.setdefault(id(node), (node.cache, rows))
            if before[0] is node.cache:
                assert all(map(torch.equal, before[1], rows))
    calls.clear()
    del before, node
    assert_no_leaks(prefixes)


def test_cached_prefixes_stay_within_their_byte_limit() -> None:
    model = build("llama")
    page = kvant.plan(model, "raw", context=64).nbytes
    prefixes = Prefixes(5 * page)
    for number in range(8):
        generate_tokens(model, make_tokens(130, seed=number), prefixes=prefixes)
        assert prefixes.nbytes <= 5 * page
    stats = prefixes.stats()
    assert stats["evicted"] > 0 and stats["prefixes"] > 0
    before = stats["tokens_hit"]
    generate_tokens(
        model, make_tokens(130, seed=7), prefixes=prefixes
    )  # the newest is still cached
    assert prefixes.stats()["tokens_hit"] - before >= 128
    assert_no_leaks(prefixes)


def test_cancelled_prompt_resumes_at_its_last_page() -> None:
    model, prefixes, prompt = build("falcon_h1"), Prefixes(), make_tokens(300, seed=0)

    def cancel(read: int, whole: int) -> None:
        if read >= 128:
            raise KeyboardInterrupt

    options: Any = {
        "kv_cache": "raw",
        "prefixes": prefixes,
        "ignore_end": True,
        "prefill_chunk": 64,
    }
    with pytest.raises(KeyboardInterrupt):
        next(kvant.generate(model, Numbers(), prompt, progress=cancel, **options))
    starts = list[int]()
    steps = kvant.generate(
        model,
        Numbers(),
        prompt,
        progress=lambda read, whole: starts.append(read),
        max_new_tokens=4,
        **options,
    )
    assert [step.token for step in steps] == generate_tokens(model, prompt, max_new_tokens=4)
    assert starts[0] == 192, "tokens were read again"


def test_sessions_share_a_common_prefix_and_keep_their_own_suffix() -> None:
    model, prefixes = build("llama"), Prefixes()
    common = " ".join(f"<{token}>" for token in make_tokens(140, seed=0))
    single, batched = list[str](), list[str]()
    for shared_prefixes, replies in ((None, single), (prefixes, batched)):
        sessions = [
            kvant.Session(model, Numbers(), "affine8,prefill=stored", prefixes=shared_prefixes)
            for _ in range(3)
        ]
        for turn in range(3):
            for number, session in enumerate(sessions):
                words = (
                    f"{common} <{9 + number}>" if turn == 0 else f"<{20 + turn}> <{30 + number}>"
                )
                steps = session.send(words, max_new_tokens=7, ignore_end=True)
                replies.append("".join(step.text for step in steps))
    assert single == batched
    assert prefixes.stats()["hit_rate"] > 0.8
    del session, sessions, steps
    assert_no_leaks(prefixes)


def test_lost_prefix_is_explained() -> None:
    model, prefixes = build("llama"), Prefixes()
    generate_tokens(model, make_tokens(200, seed=0), prefixes=prefixes)
    other = kvant.Session(model, Numbers(), "raw", prefixes=prefixes, template=False)
    prompt = make_tokens(150, seed=0)
    prompt[140:] = [5] * 10
    list(other.send(prompt, max_new_tokens=1, ignore_end=True))
    lost_text = "".join(f"<{token}>" for token in make_tokens(200, seed=0)[140:148])
    assert other.stats()["prefix_lost"] == (
        f"prefix lost at token 140: {lost_text!r} is cached, the prompt has {'<5>' * 8!r}"
    )
    assert kvant.Session(model, Numbers(), "raw").stats()["prefix_lost"] is None


def test_reopened_rows_are_not_shared() -> None:
    """A session that rewinds deeper than `slack` decodes a page again, which others may not use."""
    model, prefixes, spec = build("llama"), Prefixes(), "affine4,tail=0,prefill=stored"
    session = kvant.Session(model, Numbers(), spec, prefixes=prefixes, template=False)
    list(session.send(make_tokens(150, seed=0), max_new_tokens=100, ignore_end=True))
    session.rewind(190)
    session.send(make_tokens(100, seed=1), max_new_tokens=3, ignore_end=True).finish()
    assert session.stats()["rewinds_decoded"] == 0
    with_session = session.tokens[:250]
    assert generate_tokens(model, with_session, spec, prefixes=prefixes) == generate_tokens(
        model, with_session, spec
    )


@pytest.mark.parametrize("call", range(3, 8))
def test_interrupt_during_a_store_keeps_the_tree_valid(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The match makes two page keys, and the insertion five: two on the path, three for nodes."""
    model, prefixes, calls = build("llama"), Prefixes(), []
    generate_tokens(model, make_tokens(100, seed=0), prefixes=prefixes)

    def interrupt(*args: Any) -> bytes:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return make_page_key(*args)

    monkeypatch.setattr("kvant.prefixes.tree.make_page_key", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate_tokens(
            model, make_tokens(64, seed=0) + make_tokens(200, seed=1), prefixes=prefixes
        )
    monkeypatch.undo()
    prompt = make_tokens(64, seed=0) + make_tokens(90, seed=2)
    assert generate_tokens(model, prompt, prefixes=prefixes) == generate_tokens(model, prompt)
    assert_no_leaks(prefixes)


def test_oversized_prompt_evicts_nothing() -> None:
    model = build("llama")
    page = kvant.plan(model, "raw", context=64).nbytes
    prefixes = Prefixes(4 * page)
    generate_tokens(model, make_tokens(60, seed=0), prefixes=prefixes)
    generate_tokens(model, make_tokens(400, seed=1), prefixes=prefixes)
    assert prefixes.stats()["prefixes"] == 1 and prefixes.stats()["evicted"] == 0


def test_fork_tracks_its_own_lost_prefix() -> None:
    model, prefixes = build("llama"), Prefixes()
    generate_tokens(model, make_tokens(200, seed=0), prefixes=prefixes)
    session = kvant.Session(model, Numbers(), "raw", prefixes=prefixes, template=False)
    list(session.send(make_tokens(100, seed=0), max_new_tokens=1, ignore_end=True))
    fork = session.fork()
    fork.reset()
    list(fork.send(make_tokens(80, seed=0) + [5] * 60, max_new_tokens=1, ignore_end=True))
    assert session.stats()["prefix_lost"] is None and fork.stats()["prefix_lost"] is not None


def test_saved_conversation_continues_with_prefixes(tmp_path: Any) -> None:
    model, prefixes, path = build("llama"), Prefixes(), tmp_path / "talk.kv"
    session = kvant.Session(model, Numbers(), "raw", prefixes=prefixes, template=False)
    list(session.send(make_tokens(100, seed=0), max_new_tokens=3, ignore_end=True))
    session.save(path)
    session.resume(path)
    list(session.send(make_tokens(100, seed=1), max_new_tokens=3, ignore_end=True))
    prefixes_of_all = session.tokens
    before = prefixes.stats()["tokens_hit"]
    generate_tokens(model, prefixes_of_all, prefixes=prefixes)
    assert prefixes.stats()["tokens_hit"] - before >= 192


def test_unidentifiable_models_have_no_prefixes() -> None:
    with pytest.raises(TypeError, match="need a transformers model"):
        kvant.Session(lambda ids, cache: None, Numbers(), kvant.Cache(1), prefixes=Prefixes())
    with pytest.raises(TypeError, match="make their own cache"):
        cache = kvant.cache_for(build("llama"), "raw")
        kvant.Session(build("llama"), Numbers(), cache, prefixes=Prefixes())
    with pytest.raises(ValueError, match="a budget and prefixes"):
        kvant.Session(build("llama"), Numbers(), strategy="adaptive", budget=1, prefixes=Prefixes())
    with pytest.raises(ValueError, match="max_bytes=-1"):
        Prefixes(-1)
