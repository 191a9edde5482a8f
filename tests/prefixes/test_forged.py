"""Test blobs with a valid checksum that do not fit the model: misses, and rewritten."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from engine.test_engine import generate_alone, make_engine
from generation.speakers import Numbers
from hf.zoo import build
from kvant.prefixes import Prefixes
from kvant.prefixes.memory import PrefixPools
from kvant.stores import Blob, BlobPayload, FolderStore, Tiers, pack_blob, parse_blob
from prefixes.test_prefix_store import open_folder, read_stats
from prefixes.test_prefixes import generate_tokens, make_tokens
from thin import thin_rows

Change = Callable[[Blob], Blob]
CASES = [
    ("llama", "raw"),
    ("llama", "affine8,prefill=stored"),
    ("llama", "raw,window=100,sinks=3"),
    ("gemma3", "affine4,prefill=stored"),
    ("qwen3_next", "affine8,prefill=stored"),
    ("falcon_h1", "raw"),
]

# By default a format, a window and a state, which each need a blob of another kind.
FEW = [
    pytest.param(*case, marks=() if case in (CASES[1], CASES[2], CASES[4]) else pytest.mark.laws)
    for case in CASES
]


def change_tensors(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Change:
    """Change every tensor but the numbers of a sequence."""

    def change_blob(blob: Blob) -> Blob:
        fields = blob.payload.fields.items()
        tensors = {n: x if n.endswith("numbers") else change(n, x).contiguous() for n, x in fields}
        return replace(blob, payload=BlobPayload.from_fields(tensors))

    return change_blob


def more_heads(blob: Blob) -> Blob:
    def double_heads(name: str, x: torch.Tensor) -> torch.Tensor:
        pages = not blob.part.startswith("a-") and not name.endswith(".open")
        return torch.cat([x, x], 0 if pages else 1)

    return change_tensors(double_heads)(blob)


def change_states(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change the states of recurrent layers only."""
    return change_tensors(lambda name, x: change(x) if "/now." in name else x)


def shift_length(blob: Blob) -> Blob:
    return replace(blob, numbers={name: number + 1 for name, number in blob.numbers.items()})


FORGED: dict[str, Change] = {
    "heads": more_heads,
    "dtype": change_tensors(lambda name, x: x.double() if x.is_floating_point() else x.int()),
    "width": change_tensors(lambda name, x: torch.cat([x, x], -1)),
    "states": change_states(lambda x: torch.cat([x, x], 1)),
    "same bytes": change_states(lambda x: x.transpose(1, -1)),
    "sequences": change_states(lambda x: torch.cat([x, x])),
    "lengths": shift_length,
    "tokens": lambda blob: replace(blob, tokens=tuple(token + 1 for token in blob.tokens)),
}


RECURRENT = ("qwen3_next", "falcon_h1")
STATES_ONLY = ("states", "same bytes", "sequences", "lengths")  # others have none
CELLS = [
    (name, spec, forgery)
    for name, spec in CASES
    for forgery in FORGED
    if forgery not in STATES_ONLY or name in RECURRENT
]


def forge_blobs(path: Path, change: Change) -> int:
    """Change every blob of a folder, and return the number of changed blobs."""
    count = 0
    for file in path.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            forged = pack_blob(change(parse_blob(data)))
            count += forged != data
            file.write_bytes(forged)
    return count


def count_hit_tokens(
    model: Any, spec: str, prompt: list[int], expected: list[int], stores: Tiers
) -> int:
    """Return how many tokens of a prompt a new process finds."""
    with Prefixes(store=stores) as prefixes:
        assert generate_tokens(model, prompt, spec, prefixes=prefixes) == expected
        prefixes.flush()
        return int(prefixes.stats()["tokens_hit"])


def truncate_blobs(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])


@dataclass(frozen=True)
class StoredPrompt:
    """A folder with the blobs of a prompt, and the replies to two prompts that begin with it."""

    model: Any
    folder: Path
    first: list[int]
    second: list[int]
    replies: tuple[list[int], list[int]]
    hit_tokens: int  # of the second prompt, after the first one was stored


@pytest.fixture(scope="module")
def store_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], StoredPrompt]:
    return cache(lambda name, spec: store_prompt(name, spec, tmp_path_factory.mktemp("stored")))


def store_prompt(name: str, spec: str, folder: Path) -> StoredPrompt:
    model, prompt = build(name), make_tokens(330, seed=0)
    first, second = [*prompt, 7, 8], [*prompt, 9]
    replies = generate_tokens(model, first, spec), generate_tokens(model, second, spec)
    count_hit_tokens(model, spec, first, replies[0], open_folder(folder / "good"))
    hit_tokens = count_hit_tokens(model, spec, second, replies[1], open_folder(folder / "good"))
    reply = generate_tokens(model, prompt, spec)
    count_hit_tokens(model, spec, prompt, reply, open_folder(folder / "prompt"))
    return StoredPrompt(model, folder / "prompt", first, second, replies, hit_tokens)


@pytest.mark.parametrize(
    ("name", "spec", "forgery"), thin_rows(CELLS, lambda row: (row[:2], row[2]))
)
def test_blob_of_another_model_is_a_miss_and_rewritten(
    name: str,
    spec: str,
    forgery: str,
    tmp_path: Path,
    store_once: Callable[[str, str], StoredPrompt],
) -> None:
    """Regression: each request of its prefix failed, or rewrote one page only."""
    stored = store_once(name, spec)
    model, (first_reply, second_reply) = stored.model, stored.replies
    shutil.copytree(stored.folder, tmp_path, dirs_exist_ok=True)
    assert forge_blobs(tmp_path, FORGED[forgery])
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        assert generate_tokens(model, stored.first, spec, prefixes=prefixes) == first_reply
        prefixes.flush()
        assert read_stats(prefixes)["stores"][0]["damaged"]
    hit_tokens = count_hit_tokens(model, spec, stored.second, second_reply, open_folder(tmp_path))
    assert hit_tokens == stored.hit_tokens > 0


@pytest.mark.parametrize(("name", "spec"), FEW)
def test_truncated_blobs_are_all_rewritten_at_the_first_miss(
    name: str, spec: str, tmp_path: Path
) -> None:
    """A store lists names only. Regression: all blobs after the first bad one counted as
    written.
    """
    model, prompt = build(name), make_tokens(330, seed=0)
    expected = generate_tokens(model, prompt, spec)
    count_hit_tokens(model, spec, prompt, expected, open_folder(tmp_path))
    hit_tokens = count_hit_tokens(model, spec, prompt, expected, open_folder(tmp_path))
    truncate_blobs(tmp_path)
    count_hit_tokens(model, spec, prompt, expected, open_folder(tmp_path))
    assert count_hit_tokens(model, spec, prompt, expected, open_folder(tmp_path)) == hit_tokens > 0
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or parse_blob(file.read_bytes())


@pytest.mark.parametrize(("name", "spec"), FEW)
def test_bad_blob_hides_no_good_one_in_a_farther_store(
    name: str, spec: str, tmp_path: Path
) -> None:
    model, prompt = build(name), make_tokens(330, seed=0)
    expected, near, far = generate_tokens(model, prompt, spec), tmp_path / "near", tmp_path / "far"
    folders = [FolderStore(near, min_free=0), FolderStore(far, min_free=0)]
    count_hit_tokens(model, spec, prompt, expected, Tiers(folders))
    hit_tokens = count_hit_tokens(model, spec, prompt, expected, Tiers(folders))
    forge_blobs(near, more_heads)
    assert count_hit_tokens(model, spec, prompt, expected, Tiers(folders)) == hit_tokens > 0
    assert count_hit_tokens(model, spec, prompt, expected, open_folder(near)) == hit_tokens


@pytest.mark.parametrize(("name", "spec"), [("llama", "affine8"), ("qwen3_next", "raw")])
@pytest.mark.parametrize("forgery", ["heads", "width", "states"])
def test_engine_treats_unsuitable_blobs_as_misses(
    name: str, spec: str, forgery: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # prefilling is never faster
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    model, prompt = build(name), make_tokens(330, seed=0)
    expected = generate_alone(model, prompt, spec, max_new_tokens=4)
    restored = []
    for forged in (False, True, False):
        if forged and not forge_blobs(tmp_path, FORGED[forgery]):
            pytest.skip("its blobs have nothing of the kind")
        prefixes = Prefixes(store=open_folder(tmp_path))
        with make_engine(model, spec, prefixes=prefixes) as engine:
            result = engine.submit(prompt, max_new_tokens=4, ignore_end=True).result()
            assert list(result.tokens) == expected
            engine._worker.batch.caches.empty_cache.state.pools.check()
        prefixes.close()
        restored.append(result.usage.restored_tokens)
    assert restored[1] == 0 and restored[2] >= 256


no_numbers = change_tensors(
    lambda name, x: torch.full_like(x, torch.nan) if x.is_floating_point() else x
)


@pytest.mark.parametrize(("name", "spec"), FEW)
def test_prefix_that_fails_in_a_model_is_not_read_again(
    name: str, spec: str, tmp_path: Path
) -> None:
    """Regression: NaN rows of the right shape failed their prompt at each request."""
    model, prompt = build(name), make_tokens(330, seed=0)
    expected = generate_tokens(model, prompt, spec)
    count_hit_tokens(model, spec, prompt, expected, open_folder(tmp_path))
    hit_tokens = count_hit_tokens(model, spec, prompt, expected, open_folder(tmp_path))
    forge_blobs(tmp_path, no_numbers)
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        with pytest.raises(ValueError, match="logits are NaN"):
            generate_tokens(model, prompt, spec, prefixes=prefixes)
        assert read_stats(prefixes)["refused"] == 1
        for _ in range(2):
            assert generate_tokens(model, prompt, spec, prefixes=prefixes) == expected
    assert count_hit_tokens(model, spec, prompt, expected, open_folder(tmp_path)) == hit_tokens > 0


@pytest.mark.parametrize(("name", "spec"), [("llama", "affine8"), ("qwen3_next", "raw")])
def test_engine_fails_once_on_a_bad_prefix(
    name: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # prefilling is never faster
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    model, prompt = build(name), make_tokens(330, seed=0)
    expected = generate_alone(model, prompt, spec, max_new_tokens=4)
    options = {"max_new_tokens": 4, "ignore_end": True}
    for forged in (False, True, False):
        if forged:
            forge_blobs(tmp_path, no_numbers)
        prefixes = Prefixes(store=open_folder(tmp_path))
        with make_engine(model, spec, prefixes=prefixes) as engine:
            if forged:
                with pytest.raises(ValueError, match="logits are NaN"):
                    engine.submit(prompt, **options).result()
            result = engine.submit(prompt, **options).result()
            assert list(result.tokens) == expected
            engine._worker.batch.caches.empty_cache.state.pools.check()
        prefixes.close()
    assert result.usage.restored_tokens >= 256


def test_session_continues_after_a_bad_prefix(tmp_path: Path) -> None:
    model, prompt = build("llama"), make_tokens(330, seed=0)
    count_hit_tokens(model, "raw", prompt, generate_tokens(model, prompt), open_folder(tmp_path))
    forge_blobs(tmp_path, no_numbers)
    options = {"max_new_tokens": 6, "ignore_end": True}
    with Prefixes(store=open_folder(tmp_path)) as prefixes:
        session = kvant.Session(model, Numbers(), "raw", prefixes=prefixes, template=False)
        with pytest.raises(ValueError, match="logits are NaN"):
            session.send(prompt, **options).finish()
        steps = list(session.send(prompt, **options))
    assert [step.token for step in steps] == generate_tokens(model, prompt)
