"""What begins alike is read once: hits give what a cold run gives, and leave nothing behind."""

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
from kvant.generation import TransformersDecoder
from kvant.generation.prefill import Prefiller
from kvant.hf import TransformersCache
from kvant.prefixes import Prefixes
from kvant.prefixes.keys import make_page_key
from laws.cases import FORMATS
from thin import once

VOCABULARY = 128
FOREIGN = ("deepseek_v32", "mllama")  # some of whose layers transformers keeps
FEW = ("llama", "gemma3", "falcon_h1", "mamba", "llama4", "deepseek_v3", "qwen3_next")
DECODERS = [name for name, family in FAMILIES.items() if family.kind != "encoder-decoder"]


def text(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(count)]


def said(model: Any, prompt: list[int], spec: str = "raw", **asked: Any) -> list[int]:
    asked = {"max_new_tokens": 6, "ignore_end": True} | asked
    return [step.token for step in kvant.generate(model, Numbers(), prompt, kv_cache=spec, **asked)]


def families() -> list[Any]:
    return [pytest.param(name, marks=() if name in FEW else pytest.mark.laws) for name in DECODERS]


def leave_nothing(prefixes: Prefixes) -> None:
    """Once all is let go, no page is held."""
    homes = list(prefixes._pool_caches.values())
    for home in homes:
        home.states.check()
    prefixes.clear()
    gc.collect()
    for home in homes:
        home.states.check()
        assert home.states.measure_pools()["nbytes_held"] == 0


@pytest.mark.parametrize("name", families())
def test_a_hit_gives_the_tokens_of_a_cold_run(name: str) -> None:
    """The third prompt of a kind hits at least: the second one showed where they part."""
    model, prefixes = build(name), Prefixes()
    shared = text(150, seed=0)
    for number in range(4):
        prompt = shared + text(20 + 9 * number, seed=1 + number)
        before = prefixes.stats()["tokens_hit"]
        assert said(model, prompt, prefixes=prefixes) == said(model, prompt)
        hit = prefixes.stats()["tokens_hit"] - before
        if (
            number >= 2
            and name not in FOREIGN
            and TransformersDecoder(model).supports_chunked_prefill
        ):
            assert hit >= 128, f"{hit} tokens of a prefix of 150"
    leave_nothing(prefixes)


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
def test_a_hit_in_every_format(spec: str) -> None:
    model, prefixes = build("llama"), Prefixes()
    shared = text(300, seed=0)
    for number in range(4):
        prompt = shared + text(20 + 9 * number, seed=1 + number)
        before = prefixes.stats()["tokens_hit"]
        assert said(model, prompt, spec, prefixes=prefixes) == said(model, prompt, spec)
        if number >= 2:
            assert prefixes.stats()["tokens_hit"] - before >= 256
    leave_nothing(prefixes)


EXACT = ("llama", "falcon_h1", "gemma3", "qwen3_next", "llama4")  # read without kvant.attach
WINDOWS = ("", "sinks=3", "window=70,sinks=4", "window=200")


@pytest.mark.parametrize(("name", "codec", "window"), once(product(EXACT, FORMATS, WINDOWS)))
def test_exact_hits_have_the_bits_of_a_cold_run(name: str, codec: str, window: str) -> None:
    model, spec = build(name), ",".join(filter(None, (codec, window, "prefill=stored")))
    decoder, shared = TransformersDecoder(model), text(1100, seed=0)

    def logits(prompt: list[int], prefixes: Prefixes) -> torch.Tensor:
        memory = decoder.make_cache(spec)
        reader = Prefiller(decoder, memory, prefixes=prefixes.open_namespace(model, memory))
        found = reader.prefill(prompt)
        for token in text(4, seed=9):  # tokens of a reply, whose pages are no prompt's
            prompt = [*prompt, token]
            reader.compute_next_logits(prompt)
        reader.insert_prefix()
        return found

    warm = Prefixes(exact=True)
    for number in range(3):
        prompt = shared + text(30, seed=1 + number)
        assert torch.equal(logits(prompt, warm), logits(prompt, Prefixes(exact=True)))
    assert warm.stats()["tokens_hit"] >= 1024
    with pytest.raises(ValueError, match="prefill=stored"):
        Prefixes(exact=True).open_namespace(model, decoder.make_cache("affine8"))


def test_pages_that_are_shared_never_change() -> None:
    model, prefixes, chance = build("llama"), Prefixes(), random.Random(3)
    texts = [text(70 * n + 9, seed=n % 3) for n in range(1, 5)]
    seen: dict[int, tuple[TransformersCache, list[torch.Tensor]]] = {}
    for turn in range(24):
        prompt = chance.choice(texts)[: chance.randrange(60, 300)] + text(chance.randrange(9), turn)
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
        for kept in (kept for tree in prefixes._trees.values() for kept in tree):
            rows = [layer.read()[0].clone() for layer in kept.cache.states]
            before = seen.setdefault(id(kept), (kept.cache, rows))
            if before[0] is kept.cache:
                assert all(map(torch.equal, before[1], rows))
    seen.clear()
    del before, kept
    leave_nothing(prefixes)


def test_what_is_kept_stays_within_its_bytes() -> None:
    model = build("llama")
    page = kvant.plan(model, "raw", context=64).nbytes
    prefixes = Prefixes(5 * page)
    for number in range(8):
        said(model, text(130, seed=number), prefixes=prefixes)
        assert prefixes.nbytes <= 5 * page
    told = prefixes.stats()
    assert told["evicted"] > 0 and told["prefixes"] > 0
    before = told["tokens_hit"]
    said(model, text(130, seed=7), prefixes=prefixes)  # the newest is still there
    assert prefixes.stats()["tokens_hit"] - before >= 128
    leave_nothing(prefixes)


def test_a_prompt_that_was_cancelled_resumes_where_it_stopped() -> None:
    model, prefixes, prompt = build("falcon_h1"), Prefixes(), text(300, seed=0)

    def cancel(read: int, whole: int) -> None:
        if read >= 128:
            raise KeyboardInterrupt

    asked: Any = {"kv_cache": "raw", "prefixes": prefixes, "ignore_end": True, "prefill_chunk": 64}
    with pytest.raises(KeyboardInterrupt):
        next(kvant.generate(model, Numbers(), prompt, progress=cancel, **asked))
    begins = list[int]()
    steps = kvant.generate(
        model,
        Numbers(),
        prompt,
        progress=lambda read, whole: begins.append(read),
        max_new_tokens=4,
        **asked,
    )
    assert [step.token for step in steps] == said(model, prompt, max_new_tokens=4)
    assert begins[0] == 192, "tokens were read again"


def test_sessions_share_what_they_have_in_common_and_keep_their_own() -> None:
    model, prefixes = build("llama"), Prefixes()
    common = " ".join(f"<{token}>" for token in text(140, seed=0))
    alone, together = list[str](), list[str]()
    for given, replies in ((None, alone), (prefixes, together)):
        sessions = [
            kvant.Session(model, Numbers(), "affine8,prefill=stored", prefixes=given)
            for _ in range(3)
        ]
        for turn in range(3):
            for number, session in enumerate(sessions):
                words = (
                    f"{common} <{9 + number}>" if turn == 0 else f"<{20 + turn}> <{30 + number}>"
                )
                steps = session.send(words, max_new_tokens=7, ignore_end=True)
                replies.append("".join(step.text for step in steps))
    assert alone == together
    assert prefixes.stats()["hit_rate"] > 0.8
    del session, sessions, steps
    leave_nothing(prefixes)


def test_where_a_prefix_was_lost_is_told_in_words() -> None:
    model, prefixes = build("llama"), Prefixes()
    said(model, text(200, seed=0), prefixes=prefixes)
    other = kvant.Session(model, Numbers(), "raw", prefixes=prefixes, template=False)
    prompt = text(150, seed=0)
    prompt[140:] = [5] * 10
    list(other.send(prompt, max_new_tokens=1, ignore_end=True))
    was = "".join(f"<{token}>" for token in text(200, seed=0)[140:148])
    assert other.stats()["prefix_lost"] == (
        f"prefix lost at token 140: {was!r} was there, {'<5>' * 8!r} was asked for"
    )
    assert kvant.Session(model, Numbers(), "raw").stats()["prefix_lost"] is None


def test_rows_that_were_opened_again_are_nobody_elses() -> None:
    """A session that goes back deeper than `slack` reads a page again where others may use it."""
    model, prefixes, spec = build("llama"), Prefixes(), "affine4,tail=0,prefill=stored"
    session = kvant.Session(model, Numbers(), spec, prefixes=prefixes, template=False)
    list(session.send(text(150, seed=0), max_new_tokens=100, ignore_end=True))
    session.rewind(190)
    session.send(text(100, seed=1), max_new_tokens=3, ignore_end=True).finish()
    assert session.stats()["rewinds_decoded"] == 0
    with_session = session.tokens[:250]
    assert said(model, with_session, spec, prefixes=prefixes) == said(model, with_session, spec)


@pytest.mark.parametrize("least", range(3))
def test_an_interrupt_while_something_is_kept_leaves_a_tree(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prefixes, calls = build("llama"), Prefixes(), []
    said(model, text(100, seed=0), prefixes=prefixes)

    def interrupted(*given: Any) -> bytes:
        calls.append(1)
        if len(calls) == 1 + least:
            raise KeyboardInterrupt
        return make_page_key(*given)

    monkeypatch.setattr("kvant.prefixes.keys.make_page_key", interrupted)
    with pytest.raises(KeyboardInterrupt):
        said(model, text(64, seed=0) + text(200, seed=1), prefixes=prefixes)
    monkeypatch.undo()
    prompt = text(64, seed=0) + text(90, seed=2)
    assert said(model, prompt, prefixes=prefixes) == said(model, prompt)
    leave_nothing(prefixes)


def test_a_prompt_that_does_not_fit_drives_nobody_out() -> None:
    model = build("llama")
    page = kvant.plan(model, "raw", context=64).nbytes
    prefixes = Prefixes(4 * page)
    said(model, text(60, seed=0), prefixes=prefixes)
    said(model, text(400, seed=1), prefixes=prefixes)
    assert prefixes.stats()["prefixes"] == 1 and prefixes.stats()["evicted"] == 0


def test_a_fork_has_a_prefix_of_its_own_to_lose() -> None:
    model, prefixes = build("llama"), Prefixes()
    said(model, text(200, seed=0), prefixes=prefixes)
    session = kvant.Session(model, Numbers(), "raw", prefixes=prefixes, template=False)
    list(session.send(text(100, seed=0), max_new_tokens=1, ignore_end=True))
    twin = session.fork()
    twin.reset()
    list(twin.send(text(80, seed=0) + [5] * 60, max_new_tokens=1, ignore_end=True))
    assert session.stats()["prefix_lost"] is None and twin.stats()["prefix_lost"] is not None


def test_a_conversation_in_a_file_goes_on_with_prefixes(tmp_path: Any) -> None:
    model, prefixes, path = build("llama"), Prefixes(), tmp_path / "talk.kv"
    session = kvant.Session(model, Numbers(), "raw", prefixes=prefixes, template=False)
    list(session.send(text(100, seed=0), max_new_tokens=3, ignore_end=True))
    session.save(path)
    session.resume(path)
    list(session.send(text(100, seed=1), max_new_tokens=3, ignore_end=True))
    prefixes_of_all = session.tokens
    before = prefixes.stats()["tokens_hit"]
    said(model, prefixes_of_all, prefixes=prefixes)
    assert prefixes.stats()["tokens_hit"] - before >= 192


def test_models_that_nobody_knows_have_no_prefixes() -> None:
    with pytest.raises(TypeError, match="models of transformers"):
        kvant.Session(lambda ids, cache: None, Numbers(), kvant.Cache(1), prefixes=Prefixes())
    with pytest.raises(TypeError, match="bring their own"):
        cache = kvant.cache_for(build("llama"), "raw")
        kvant.Session(build("llama"), Numbers(), cache, prefixes=Prefixes())
    with pytest.raises(ValueError, match="a budget beside prefixes"):
        kvant.Session(build("llama"), Numbers(), strategy="adaptive", budget=1, prefixes=Prefixes())
    with pytest.raises(ValueError, match="max_bytes=-1"):
        Prefixes(-1)
