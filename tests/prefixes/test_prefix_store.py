"""Test prefixes that survive a restart: earlier hits hit again, and corrupt blobs are prefilled."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

import kvant
from generation.speakers import Numbers
from hf.zoo import build
from kvant.cache.reports import measure_pools
from kvant.cache.transfer import PageSet
from kvant.generation import TransformersDecoder
from kvant.prefixes import Prefixes, restore
from kvant.prefixes.memory import PrefixPools
from kvant.stores import FolderStore, Tiers
from prefixes.test_prefixes import (
    FOREIGN,
    SPECS,
    assert_no_leaks,
    family_params,
    generate_tokens,
    make_tokens,
)


def open_folder(path: Path) -> Tiers:
    return Tiers([FolderStore(path, min_free=0)])


def read_stats(prefixes: Prefixes) -> dict[str, Any]:
    store: dict[str, Any] = prefixes.stats()["store"]
    return store


def check_restart(model: Any, spec: str, path: Path) -> None:
    """Assert that prefixes cached in memory hit again with the same tokens."""
    prompts, expected, hits, before = [], [], 0, make_tokens(150, seed=0)
    with Prefixes(store=open_folder(path)) as prefixes:
        for turn in range(3):
            prompts.append(before + make_tokens(40 + 20 * turn, seed=1 + turn))
            before = prompts[-1] + generate_tokens(model, prompts[-1], spec, prefixes=prefixes)
        for prompt in prompts:
            hit = prefixes.stats()["tokens_hit"]
            expected.append(generate_tokens(model, prompt, spec, prefixes=prefixes))
            hits += prefixes.stats()["tokens_hit"] - hit
        prefixes.flush()
        assert not read_stats(prefixes)["dropped"] and hits
    restart_hits = 0
    for prompt, tokens in zip(prompts, expected, strict=True):
        with Prefixes(store=open_folder(path)) as prefixes:  # a process with an empty cache
            assert generate_tokens(model, prompt, spec, prefixes=prefixes) == tokens
            restart_hits += prefixes.stats()["tokens_hit"]
            assert restart_hits == 0 or read_stats(prefixes)["tokens_restored"]
            prefixes.flush()
            assert_no_leaks(prefixes)
    assert restart_hits >= 0.95 * hits, f"{restart_hits} of {hits}"


@pytest.mark.parametrize("name", family_params())
def test_prefixes_hit_again_after_a_restart(name: str, tmp_path: Path) -> None:
    model = build(name)
    if name in FOREIGN or not TransformersDecoder(model).supports_chunked_prefill:
        fill_with_conversation(model, tmp_path)
    else:
        check_restart(model, "raw", tmp_path)


def fill_with_conversation(model: Any, path: Path) -> None:
    with Prefixes(store=open_folder(path)) as prefixes:
        generate_tokens(model, make_tokens(200, seed=0), prefixes=prefixes)
    assert not list(FolderStore(path))


def test_restored_prefix_has_nothing_to_write(tmp_path: Path) -> None:
    """Regression: its write was never queued and never done, and an eviction waited for it."""
    model, prompt = build("llama"), make_tokens(256, seed=0)
    for _ in range(2):
        with Prefixes(store=open_folder(tmp_path)) as prefixes:
            generate_tokens(model, prompt, prefixes=prefixes, max_new_tokens=1)
            prefixes.flush()
            assert not any(pools.has_unwritten for pools in prefixes.memory)


@pytest.mark.parametrize("spec", SPECS)
def test_restart_works_in_every_format(spec: str, tmp_path: Path) -> None:
    check_restart(build("llama"), spec, tmp_path)


@pytest.mark.parametrize("page", [32, 64, 96])
def test_pages_of_any_size_are_restored(page: int, tmp_path: Path) -> None:
    """Regression: pages that end within 64 tokens had one name for all prompts."""
    model, prompts = build("llama"), [make_tokens(400, seed=seed) for seed in range(2)]
    layer = replace(kvant.parse("raw", 1).layers[0], page=page)
    for prompt in (*prompts, prompts[1]):
        with Prefixes(store=open_folder(tmp_path)) as prefixes:
            session = kvant.Session(model, Numbers(), layer, prefixes=prefixes, template=False)
            session.send(prompt, max_new_tokens=1).finish()
            prefixes.flush()
            counts = read_stats(prefixes)["stores"][0]
            assert not counts["damaged"] and not counts["errors"]
    assert session.stats()["tokens_restored"] == 384


def test_restart_gives_the_bits_of_a_cold_run(tmp_path: Path) -> None:
    model, spec, prompt = build("llama"), "affine8,prefill=stored", make_tokens(1100, seed=0)

    def logprobs(prompt: list[int], prefixes: Prefixes) -> tuple[list[float], int]:
        session = kvant.Session(
            model, Numbers(), spec, prefixes=prefixes, template=False, max_context=2000
        )
        steps = session.send(prompt, max_new_tokens=4, ignore_end=True)
        return [step.logprob for step in steps], session.stats()["tokens_restored"]

    with Prefixes(exact=True, store=open_folder(tmp_path)) as prefixes:
        logprobs(prompt, prefixes)
    with Prefixes(exact=True, store=open_folder(tmp_path)) as prefixes:
        warm, restored = logprobs([*prompt, 5], prefixes)
        assert restored == 1024
    assert warm == logprobs([*prompt, 5], Prefixes(exact=True))[0]


@pytest.mark.parametrize("turns", [4, pytest.param(12, marks=pytest.mark.laws)])
@pytest.mark.parametrize(
    "spec", ["affine8,prefill=stored", "affine4,prefill=stored", "raw,window=100,sinks=3"]
)
def test_corrupt_blob_is_a_miss(spec: str, turns: int, tmp_path: Path) -> None:
    """vLLM #49250: a failed load must not leave rows of another prefix."""
    model, chance = build("llama"), random.Random(0)
    prompt = make_tokens(330, seed=0)
    expected = generate_tokens(model, [*prompt, 7, 8], spec)
    for turn in range(turns):
        path = tmp_path / str(turn)
        with Prefixes(store=open_folder(path)) as prefixes:
            generate_tokens(model, prompt, spec, prefixes=prefixes)
        files = sorted(path_ for path_ in path.rglob("*") if path_.is_file())
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
        for _ in (*damaged, "and all of them are there again"):  # each finds at least one
            with Prefixes(store=open_folder(path)) as prefixes:
                assert generate_tokens(model, [*prompt, 7, 8], spec, prefixes=prefixes) == expected
                hit = prefixes.stats()["tokens_hit"]
        assert hit >= 320


def test_foreign_pages_are_not_read(tmp_path: Path) -> None:
    """SGLang #24758, vLLM #44701, #53347, #55904: other weights, salts and specs, one store."""
    prompt = make_tokens(200, seed=0)
    first, second = build("llama"), build("llama")
    with torch.no_grad():
        second.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        generate_tokens(first, prompt, prefixes=prefixes)
    for model, spec, salt in (
        (second, "raw", ""),
        (first, "raw", "a"),
        (first, "raw,page=128", ""),
    ):
        with Prefixes(store=open_folder(tmp_path), salt=salt) as prefixes:
            assert generate_tokens(model, prompt, spec, prefixes=prefixes) == generate_tokens(
                model, prompt, spec
            )
            assert prefixes.stats()["tokens_hit"] == 0
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        generate_tokens(first, prompt, prefixes=prefixes)
        assert prefixes.stats()["tokens_hit"] >= 192


def test_one_thread_suffices_for_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, started = build("llama"), make_tokens(400, seed=0), list[str]()
    start = restore.start_daemon

    def start_one(call: Any, name: str) -> Any:
        if name in started:
            raise RuntimeError("can't start new thread")
        started.append(name)
        return start(call, name)

    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        expected = generate_tokens(model, prompt, prefixes=prefixes)
    monkeypatch.setattr(restore, "MAX_RUN_PAGES", 1)
    monkeypatch.setattr(restore, "start_daemon", start_one)
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        assert generate_tokens(model, prompt, prefixes=prefixes) == expected
        assert read_stats(prefixes)["tokens_restored"] >= 384
    assert started == ["kvant-restore"]


def test_evicted_prefix_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    # prefilling is never faster
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    page = kvant.plan(model, "raw", context=64).nbytes
    prompts = [make_tokens(250, seed=seed) for seed in range(6)]
    with Prefixes(6 * page, store=open_folder(tmp_path)) as prefixes:
        for prompt in prompts:
            generate_tokens(model, prompt, prefixes=prefixes)
            prefixes.flush()
        assert prefixes.stats()["evicted"] and prefixes.nbytes <= 6 * page
        for prompt in prompts:
            before = prefixes.stats()["tokens_hit"]
            assert generate_tokens(model, [*prompt, 9], prefixes=prefixes) == generate_tokens(
                model, [*prompt, 9]
            )
            assert prefixes.stats()["tokens_hit"] - before == 250


def test_cached_pages_are_used_and_missing_blobs_rewritten(tmp_path: Path) -> None:
    model, prompt = build("llama"), make_tokens(400, seed=0)
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        generate_tokens(model, prompt, "raw", prefixes=prefixes)
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        generate_tokens(
            model, prompt[:210], "raw", prefixes=prefixes
        )  # three of its pages are cached
        prefixes.flush()
        pages = {path.name: path for path in tmp_path.rglob("k0-*")}
        for path in pages.values():
            os.utime(path, (1e9, 1e9))
        pages["k0-1"].unlink()
        generate_tokens(model, [*prompt[:390], 7], "raw", prefixes=prefixes)
        prefixes.flush()
        assert prefixes.stats()["store"]["tokens_restored"] >= 192
    assert pages["k0-1"].exists()
    assert all(path.stat().st_mtime > 1e9 for path in pages.values())


def test_pages_are_written_once(tmp_path: Path) -> None:
    model = build("llama")
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        for seed in range(5):
            generate_tokens(
                model, make_tokens(192, seed=0) + make_tokens(30, seed=1 + seed), prefixes=prefixes
            )
        prefixes.flush()
        names = [entry.part for entry in FolderStore(tmp_path)]
        assert sorted(name for name in names if name.startswith("k")) == ["k0-0", "k0-1", "k0-2"]
        assert read_stats(prefixes)["stores"][0]["written"] == len(names) == 3 + 10
    with Prefixes(store=open_folder(tmp_path)) as prefixes:  # another process
        for seed in range(5):
            generate_tokens(
                model, make_tokens(192, seed=0) + make_tokens(30, seed=1 + seed), prefixes=prefixes
            )
        prefixes.flush()
        assert read_stats(prefixes)["stores"][0]["written"] == 0


def test_releasing_a_prefix_frees_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while its pages are being copied for a write."""
    model, copies, go, copy = build("llama"), Event(), Event(), PageSet.copy_pages

    def halting(self: PageSet, *args: Any) -> None:
        copies.set()
        go.wait(10)
        copy(self, *args)

    monkeypatch.setattr(PageSet, "copy_pages", halting)
    holder_counts: list[int] = []
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        generate_tokens(model, make_tokens(200, seed=0), prefixes=prefixes)
        (home,) = (pools.cache for pools in prefixes.memory)
        assert home is not None
        assert copies.wait(10)

        def let_go() -> None:
            assert prefixes.evict(prefixes.nbytes)
            holder_counts.append(measure_pools(home.states)["nbytes_held"])

        evicting = Thread(target=let_go)
        evicting.start()
        evicting.join(0.2)
        assert not holder_counts  # it waits
        go.set()
        evicting.join(10)
        assert holder_counts == [0]


class DeadStore(FolderStore):
    """A store that always fails."""

    def has(self, pages: Any) -> Any:
        raise OSError("gone")

    put = get = drop = has  # type: ignore[assignment]


def test_failing_store_raises_nothing(tmp_path: Path) -> None:
    model, prompt = build("llama"), make_tokens(200, seed=0)
    with Prefixes(store=Tiers([DeadStore(tmp_path)])) as prefixes:
        for end in range(3):
            assert generate_tokens(model, [*prompt, end], prefixes=prefixes) == generate_tokens(
                model, [*prompt, end]
            )
        prefixes.flush()
        assert read_stats(prefixes)["stores"][0]["errors"] >= 5
        assert read_stats(prefixes)["stores"][0]["resting"]


def test_restore_slower_than_prefill_is_skipped(tmp_path: Path) -> None:
    model, prompt = build("llama"), make_tokens(400, seed=0)
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        generate_tokens(model, prompt, prefixes=prefixes)
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        generate_tokens(
            model, make_tokens(200, seed=1), prefixes=prefixes
        )  # measures the prefill time
        assert prefixes.prefix_store is not None
        prefixes.prefix_store.restore_times.record_timeout(400, 1e3)
        generate_tokens(model, prompt, prefixes=prefixes)
        assert prefixes.stats()["tokens_hit"] == 0
