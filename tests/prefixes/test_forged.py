"""Blobs with a right checksum that do not fit the model are misses, and written anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from engine.test_engine import alone, engine_for
from generation.speakers import Numbers
from hf.zoo import build
from kvant.prefixes import Prefixes
from kvant.stores import Blob, BlobPayload, FolderStore, Tiers, pack_blob, parse_blob
from prefixes.test_archive import folder, told
from prefixes.test_prefixes import said, text

Change = Callable[[Blob], Blob]
CASES = [
    ("llama", "raw"),
    ("llama", "affine8,prefill=stored"),
    ("llama", "raw,window=100,sinks=3"),
    ("gemma3", "affine4,prefill=stored"),
    ("qwen3_next", "affine8,prefill=stored"),
    ("falcon_h1", "raw"),
]


def with_tensors(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Change:
    """Change every tensor but the numbers of a sequence."""

    def changed(blob: Blob) -> Blob:
        fields = blob.payload.fields.items()
        held = {n: x if n.endswith("numbers") else change(n, x).contiguous() for n, x in fields}
        return replace(blob, payload=BlobPayload.from_fields(held))

    return changed


def more_heads(blob: Blob) -> Blob:
    def doubled(name: str, x: torch.Tensor) -> torch.Tensor:
        pages = not blob.part.startswith("a-") and not name.endswith(".open")
        return torch.cat([x, x], 0 if pages else 1)

    return with_tensors(doubled)(blob)


def of_states(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change the states of recurrent layers alone."""
    return with_tensors(lambda name, x: change(x) if "/now." in name else x)


def later(blob: Blob) -> Blob:
    return replace(blob, numbers={name: number + 1 for name, number in blob.numbers.items()})


FORGED: dict[str, Change] = {
    "heads": more_heads,
    "dtype": with_tensors(lambda name, x: x.double() if x.is_floating_point() else x.int()),
    "width": with_tensors(lambda name, x: torch.cat([x, x], -1)),
    "states": of_states(lambda x: torch.cat([x, x], 1)),
    "same bytes": of_states(lambda x: x.transpose(1, -1)),
    "sequences": of_states(lambda x: torch.cat([x, x])),
    "lengths": later,
    "tokens": lambda blob: replace(blob, tokens=tuple(token + 1 for token in blob.tokens)),
}


def forge(path: Path, change: Change) -> int:
    """Change every blob of a folder; how many differ."""
    count = 0
    for file in path.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            forged = pack_blob(change(parse_blob(data)))
            count += forged != data
            file.write_bytes(forged)
    return count


def hit(model: Any, spec: str, prompt: list[int], expected: list[int], stores: Tiers) -> int:
    """How many tokens of a prompt a new process hits."""
    with Prefixes(store=stores) as prefixes:
        assert said(model, prompt, spec, prefixes=prefixes) == expected
        prefixes.flush()
        return int(prefixes.stats()["tokens_hit"])


def cut_short(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("forgery", FORGED)
@pytest.mark.parametrize(("name", "spec"), CASES)
def test_a_blob_that_does_not_fit_the_model_is_a_miss_and_written_anew(
    name: str, spec: str, forgery: str, tmp_path: Path
) -> None:
    """Each request of its prefix had failed, or had written one page anew."""
    model, prompt = build(name), text(330, seed=0)
    one, other = [*prompt, 7, 8], [*prompt, 9]
    expected = said(model, one, spec), said(model, other, spec)
    hit(model, spec, one, expected[0], folder(tmp_path / "good"))
    most = hit(model, spec, other, expected[1], folder(tmp_path / "good"))
    hit(model, spec, prompt, said(model, prompt, spec), folder(tmp_path))
    if not forge(tmp_path, FORGED[forgery]):
        pytest.skip("its blobs have nothing of the kind")
    with Prefixes(store=folder(tmp_path)) as prefixes:
        assert said(model, one, spec, prefixes=prefixes) == expected[0]
        prefixes.flush()
        assert told(prefixes)["stores"][0]["damaged"]
    assert hit(model, spec, other, expected[1], folder(tmp_path)) == most > 0


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_blobs_that_are_cut_short_are_all_written_at_the_first_miss(
    name: str, spec: str, tmp_path: Path
) -> None:
    """A store lists names alone: behind the first bad blob, all others counted as written."""
    model, prompt = build(name), text(330, seed=0)
    expected = said(model, prompt, spec)
    hit(model, spec, prompt, expected, folder(tmp_path))
    most = hit(model, spec, prompt, expected, folder(tmp_path))
    cut_short(tmp_path)
    hit(model, spec, prompt, expected, folder(tmp_path))
    assert hit(model, spec, prompt, expected, folder(tmp_path)) == most > 0
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or parse_blob(file.read_bytes())


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_a_bad_blob_hides_no_good_one_farther_away(name: str, spec: str, tmp_path: Path) -> None:
    model, prompt = build(name), text(330, seed=0)
    expected, near, far = said(model, prompt, spec), tmp_path / "near", tmp_path / "far"
    both = [FolderStore(near, min_free=0), FolderStore(far, min_free=0)]
    hit(model, spec, prompt, expected, Tiers(both))
    most = hit(model, spec, prompt, expected, Tiers(both))
    forge(near, more_heads)
    assert hit(model, spec, prompt, expected, Tiers(both)) == most > 0
    assert hit(model, spec, prompt, expected, folder(near)) == most


@pytest.mark.parametrize(("name", "spec"), [("llama", "affine8"), ("qwen3_next", "raw")])
@pytest.mark.parametrize("forgery", ["heads", "width", "states"])
def test_an_engine_reads_blobs_that_do_not_fit_as_misses(
    name: str, spec: str, forgery: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Prefixes, "_record_prefill_time", lambda *given: None
    )  # to read it is never sooner
    model, prompt = build(name), text(330, seed=0)
    expected = alone(model, prompt, spec, max_new_tokens=4)
    restored = []
    for forged in (False, True, False):
        if forged and not forge(tmp_path, FORGED[forgery]):
            pytest.skip("its blobs have nothing of the kind")
        prefixes = Prefixes(store=folder(tmp_path))
        with engine_for(model, spec, prefixes=prefixes) as engine:
            result = engine.submit(prompt, max_new_tokens=4, ignore_end=True).result()
            assert list(result.tokens) == expected
            engine._batch.check()
        prefixes.close()
        restored.append(result.usage.restored_tokens)
    assert restored[1] == 0 and restored[2] >= 256


no_numbers = with_tensors(
    lambda name, x: torch.full_like(x, torch.nan) if x.is_floating_point() else x
)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_a_prefix_with_which_a_model_fails_is_read_no_more(
    name: str, spec: str, tmp_path: Path
) -> None:
    """Rows of the right shape that are no numbers: their prompt had failed at each request."""
    model, prompt = build(name), text(330, seed=0)
    expected = said(model, prompt, spec)
    hit(model, spec, prompt, expected, folder(tmp_path))
    most = hit(model, spec, prompt, expected, folder(tmp_path))
    forge(tmp_path, no_numbers)
    with Prefixes(store=folder(tmp_path)) as prefixes:
        with pytest.raises(ValueError, match="not numbers"):
            said(model, prompt, spec, prefixes=prefixes)
        assert told(prefixes)["refused"] == 1
        for _ in range(2):
            assert said(model, prompt, spec, prefixes=prefixes) == expected
    assert hit(model, spec, prompt, expected, folder(tmp_path)) == most > 0


@pytest.mark.parametrize(("name", "spec"), [("llama", "affine8"), ("qwen3_next", "raw")])
def test_an_engine_fails_once_with_a_prefix(
    name: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Prefixes, "_record_prefill_time", lambda *given: None
    )  # to read it is never sooner
    model, prompt = build(name), text(330, seed=0)
    expected = alone(model, prompt, spec, max_new_tokens=4)
    asked = {"max_new_tokens": 4, "ignore_end": True}
    for forged in (False, True, False):
        if forged:
            forge(tmp_path, no_numbers)
        prefixes = Prefixes(store=folder(tmp_path))
        with engine_for(model, spec, prefixes=prefixes) as engine:
            if forged:
                with pytest.raises(ValueError, match="not numbers"):
                    engine.submit(prompt, **asked).result()
            result = engine.submit(prompt, **asked).result()
            assert list(result.tokens) == expected
            engine._batch.check()
        prefixes.close()
    assert result.usage.restored_tokens >= 256


def test_a_session_goes_on_after_it_failed_with_a_prefix(tmp_path: Path) -> None:
    model, prompt = build("llama"), text(330, seed=0)
    hit(model, "raw", prompt, said(model, prompt), folder(tmp_path))
    forge(tmp_path, no_numbers)
    asked = {"max_new_tokens": 6, "ignore_end": True}
    with Prefixes(store=folder(tmp_path)) as prefixes:
        session = kvant.Session(model, Numbers(), "raw", prefixes=prefixes, template=False)
        with pytest.raises(ValueError, match="not numbers"):
            session.send(prompt, **asked).finish()
        steps = list(session.send(prompt, **asked))
    assert [step.token for step in steps] == said(model, prompt)
