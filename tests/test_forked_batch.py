"""tools/forked_batch.py continues forks of unequal lengths as it continues each alone."""

from __future__ import annotations

import torch

from forked_batch import continue_greedily
from kvant.checkpoints import load
from kvant.generation.decoder import TransformersDecoder
from kvant.hf import TransformersCache
from kvant.probing.divergence import make_empty_cache, read_prompt

LENGTHS, MAX_TOKENS = (40, 70), 24


def test_batch_of_unequal_lengths_equals_one_by_one() -> None:
    model, tokenizer = load(None, device="cpu", dtype="float32")
    ids = tokenizer.encode("def read(path):\n    with open(path) as file:\n" * 8)
    caches, logits = list[TransformersCache](), []
    for length in LENGTHS:
        caches.append(make_empty_cache(model, "affine8"))
        logits.append(read_prompt(model, torch.tensor([ids[:length]]), caches[-1]))

    def continue_both(numbers: list[int]) -> list[list[int]]:
        forks = [caches[number].fork() for number in numbers]
        rows = torch.stack([logits[number] for number in numbers])
        return continue_greedily(
            TransformersDecoder(model), forks, rows, MAX_TOKENS, lambda tokens: len(tokens) == 20
        )

    together = continue_both([0, 1])
    assert [*map(len, together)] == [20, 20]
    assert together == continue_both([0]) + continue_both([1])
