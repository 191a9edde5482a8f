"""Prefixes outlive a process: what hit before it ended hits again, and what is damaged is read."""

from __future__ import annotations

import os
import random
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

import kvant
from generation.speakers import Numbers
from hf.zoo import build
from kvant.cache.page_set import PageSet
from kvant.generation import TransformersDecoder
from kvant.prefixes import Prefixes
from kvant.stores import FolderStore, Tiers
from prefixes.test_prefixes import FOREIGN, SPECS, families, leave_nothing, said, text


def folder(path: Path) -> Tiers:
    return Tiers([FolderStore(path, min_free=0)])


def told(prefixes: Prefixes) -> dict[str, Any]:
    store: dict[str, Any] = prefixes.stats()["store"]
    return store


def after_a_restart(model: Any, spec: str, path: Path) -> None:
    """What hit in memory hits again, and gives the same tokens."""
    prompts, expected, hits, before = [], [], 0, text(150, seed=0)
    with Prefixes(store=folder(path)) as prefixes:
        for turn in range(4):
            prompts.append(before + text(40 + 20 * turn, seed=1 + turn))
            before = prompts[-1] + said(model, prompts[-1], spec, prefixes=prefixes)
        for prompt in prompts:
            hit = prefixes.stats()["tokens_hit"]
            expected.append(said(model, prompt, spec, prefixes=prefixes))
            hits += prefixes.stats()["tokens_hit"] - hit
        prefixes.flush()
        assert not told(prefixes)["dropped"] and hits
    again = 0
    for prompt, tokens in zip(prompts, expected, strict=True):
        with Prefixes(store=folder(path)) as prefixes:  # as in a process that has nothing in memory
            assert said(model, prompt, spec, prefixes=prefixes) == tokens
            again += prefixes.stats()["tokens_hit"]
            assert again == 0 or told(prefixes)["tokens_restored"]
            prefixes.flush()
            leave_nothing(prefixes)
    assert again >= 0.95 * hits, f"{again} of {hits}"


@pytest.mark.parametrize("name", families())
def test_what_hit_before_hits_after_a_restart(name: str, tmp_path: Path) -> None:
    model = build(name)
    if name in FOREIGN or not TransformersDecoder(model).supports_chunked_prefill:
        conversation_of_nothing(model, tmp_path)
    else:
        after_a_restart(model, "raw", tmp_path)


def conversation_of_nothing(model: Any, path: Path) -> None:
    with Prefixes(store=folder(path)) as prefixes:
        said(model, text(200, seed=0), prefixes=prefixes)
    assert not list(FolderStore(path))


@pytest.mark.parametrize("spec", SPECS)
def test_a_restart_in_every_format(spec: str, tmp_path: Path) -> None:
    after_a_restart(build("llama"), spec, tmp_path)


def test_a_restart_with_the_bits_of_a_cold_run(tmp_path: Path) -> None:
    model, spec, prompt = build("llama"), "affine8,prefill=stored", text(1100, seed=0)

    def logprobs(prompt: list[int], prefixes: Prefixes) -> tuple[list[float], int]:
        session = kvant.Session(
            model, Numbers(), spec, prefixes=prefixes, template=False, max_context=2000
        )
        steps = session.send(prompt, max_new_tokens=4, ignore_end=True)
        return [step.logprob for step in steps], session.stats()["tokens_restored"]

    with Prefixes(exact=True, store=folder(tmp_path)) as prefixes:
        logprobs(prompt, prefixes)
    with Prefixes(exact=True, store=folder(tmp_path)) as prefixes:
        warm, restored = logprobs([*prompt, 5], prefixes)
        assert restored == 1024
    assert warm == logprobs([*prompt, 5], Prefixes(exact=True))[0]


@pytest.mark.parametrize(
    "spec", ["affine8,prefill=stored", "affine4,prefill=stored", "raw,window=100,sinks=3"]
)
def test_whatever_is_damaged_is_a_miss(spec: str, tmp_path: Path) -> None:
    """vLLM #49250: a load that fails must not leave rows of something else."""
    model, chance = build("llama"), random.Random(0)
    prompt = text(330, seed=0)
    expected = said(model, [*prompt, 7, 8], spec)
    for turn in range(12):
        path = tmp_path / str(turn)
        with Prefixes(store=folder(path)) as prefixes:
            said(model, prompt, spec, prefixes=prefixes)
        files = sorted(one for one in path.rglob("*") if one.is_file())
        damaged = chance.sample(files, min(len(files), 1 + turn % 3))
        for file in damaged:
            data = bytearray(file.read_bytes())
            if turn % 4 == 0:
                file.unlink()
            elif turn % 4 == 1:
                file.write_bytes(data[: chance.randrange(len(data))])
            elif turn % 4 == 2:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                file.write_bytes(data)
            else:
                file.write_bytes(chance.choice(files).read_bytes() if len(files) > 1 else b"")
        for _ in (*damaged, "and all of them are there again"):  # each finds one at least
            with Prefixes(store=folder(path)) as prefixes:
                assert said(model, [*prompt, 7, 8], spec, prefixes=prefixes) == expected
                hit = prefixes.stats()["tokens_hit"]
        assert hit >= 320


def test_pages_of_others_are_not_read(tmp_path: Path) -> None:
    """SGLang #24758, vLLM #44701, #53347, #55904: other weights, salts and specs, one store."""
    prompt = text(200, seed=0)
    one, other = build("llama"), build("llama")
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    with Prefixes(store=folder(tmp_path)) as prefixes:
        said(one, prompt, prefixes=prefixes)
    for model, spec, salt in ((other, "raw", ""), (one, "raw", "a"), (one, "raw,page=128", "")):
        with Prefixes(store=folder(tmp_path), salt=salt) as prefixes:
            assert said(model, prompt, spec, prefixes=prefixes) == said(model, prompt, spec)
            assert prefixes.stats()["tokens_hit"] == 0
    with Prefixes(store=folder(tmp_path)) as prefixes:
        said(one, prompt, prefixes=prefixes)
        assert prefixes.stats()["tokens_hit"] >= 192


def test_a_prefix_that_was_evicted_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    monkeypatch.setattr(
        Prefixes, "_record_prefill_time", lambda *given: None
    )  # to read it is never sooner
    page = kvant.plan(model, "raw", context=64).nbytes
    prompts = [text(250, seed=seed) for seed in range(6)]
    with Prefixes(6 * page, store=folder(tmp_path)) as prefixes:
        for prompt in prompts:
            said(model, prompt, prefixes=prefixes)
            prefixes.flush()
        assert prefixes.stats()["evicted"] and prefixes.nbytes <= 6 * page
        for prompt in prompts:
            before = prefixes.stats()["tokens_hit"]
            assert said(model, [*prompt, 9], prefixes=prefixes) == said(model, [*prompt, 9])
            assert prefixes.stats()["tokens_hit"] - before == 250


def test_what_is_in_memory_is_used_and_written_anew_where_it_went(tmp_path: Path) -> None:
    model, prompt = build("llama"), text(400, seed=0)
    with Prefixes(store=folder(tmp_path)) as prefixes:
        said(model, prompt, "raw", prefixes=prefixes)
    with Prefixes(store=folder(tmp_path)) as prefixes:
        said(model, prompt[:210], "raw", prefixes=prefixes)  # three of its pages are in memory
        prefixes.flush()
        pages = {path.name: path for path in tmp_path.rglob("k0-*")}
        for path in pages.values():
            os.utime(path, (1e9, 1e9))
        pages["k0-1"].unlink()
        said(model, [*prompt[:390], 7], "raw", prefixes=prefixes)
        prefixes.flush()
        assert prefixes.stats()["store"]["tokens_restored"] >= 192
    assert pages["k0-1"].exists()
    assert all(path.stat().st_mtime > 1e9 for path in pages.values())


def test_pages_are_written_once(tmp_path: Path) -> None:
    model = build("llama")
    with Prefixes(store=folder(tmp_path)) as prefixes:
        for seed in range(5):
            said(model, text(192, seed=0) + text(30, seed=1 + seed), prefixes=prefixes)
        prefixes.flush()
        names = [entry.part for entry in FolderStore(tmp_path)]
        assert sorted(name for name in names if name.startswith("k")) == ["k0-0", "k0-1", "k0-2"]
        assert told(prefixes)["stores"][0]["written"] == len(names) == 3 + 10
    with Prefixes(store=folder(tmp_path)) as prefixes:  # another process
        for seed in range(5):
            said(model, text(192, seed=0) + text(30, seed=1 + seed), prefixes=prefixes)
        prefixes.flush()
        assert told(prefixes)["stores"][0]["written"] == 0


def test_who_lets_go_of_a_prefix_has_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while its pages are being copied, to be written."""
    model, copies, go, copy = build("llama"), Event(), Event(), PageSet.copy_pages

    def halting(self: PageSet, *given: Any) -> None:
        copies.set()
        go.wait(10)
        copy(self, *given)

    monkeypatch.setattr(PageSet, "copy_pages", halting)
    held: list[int] = []
    with Prefixes(store=folder(tmp_path)) as prefixes:
        said(model, text(200, seed=0), prefixes=prefixes)
        (home,) = prefixes._pool_caches.values()
        assert copies.wait(10)

        def let_go() -> None:
            assert prefixes.evict(prefixes.nbytes)
            held.append(home.states.measure_pools()["nbytes_held"])

        evicting = Thread(target=let_go)
        evicting.start()
        evicting.join(0.2)
        assert not held  # it waits
        go.set()
        evicting.join(10)
        assert held == [0]


class Dead(FolderStore):
    """A store that is gone."""

    def has(self, pages: Any) -> Any:
        raise OSError("gone")

    put = get = drop = has  # type: ignore[assignment]


def test_a_store_that_is_gone_is_nobodys_error(tmp_path: Path) -> None:
    model, prompt = build("llama"), text(200, seed=0)
    with Prefixes(store=Tiers([Dead(tmp_path)])) as prefixes:
        for end in range(3):
            assert said(model, [*prompt, end], prefixes=prefixes) == said(model, [*prompt, end])
        prefixes.flush()
        assert told(prefixes)["stores"][0]["errors"] >= 5
        assert told(prefixes)["stores"][0]["resting"]


def test_what_takes_longer_than_reading_is_read(tmp_path: Path) -> None:
    model, prompt = build("llama"), text(400, seed=0)
    with Prefixes(store=folder(tmp_path)) as prefixes:
        said(model, prompt, prefixes=prefixes)
    with Prefixes(store=folder(tmp_path)) as prefixes:
        said(model, text(200, seed=1), prefixes=prefixes)  # now it is known how long that takes
        assert prefixes.prefix_store is not None
        prefixes.prefix_store.restore_times.record_timeout(400, 1e3)
        said(model, prompt, prefixes=prefixes)
        assert prefixes.stats()["tokens_hit"] == 0
