"""Test rewinds of each sequence to its own length; laws/test_random_operations.py has more."""

from __future__ import annotations

import pytest
import torch

from cache.tagged import assert_same
from hf.zoo import build
from kvant import Cache, CacheSpec, RecurrentSpec, RewindError, cache_for, parse


def test_each_sequence_is_rewound_to_its_own_length() -> None:
    cache, keys = Cache(1, "affine4,tail=3"), torch.randn(3, 2, 100, 16)
    cache[0].append(keys, keys)
    cache.rewind_each([100, 91, 88])
    assert cache.lengths == [100, 91, 88] and cache.length == 100
    for index, length in enumerate(cache.lengths):
        alone = cache.extract(index)[0].read()[0]
        assert torch.equal(alone[0, :, 80:], keys[index, :, 80:length])
    cache.rewind_each([88, 88, 88])
    assert cache.lengths == [88, 88, 88]
    Cache(1).rewind_each([])


def test_lengths_that_a_sequence_cannot_have_are_refused() -> None:
    cache, keys = Cache(1, "raw,window=20,slack=3"), torch.randn(2, 2, 100, 16)
    cache[0].append(keys, keys)
    before = cache.snapshot()
    for lengths, error in {
        (100,): "1 lengths for 2 sequences: one for each is needed",
        (100, 101): r"lengths\[1\]=101: sequence 1 has 100 tokens, so 0 to 100",
        (-1, 100): r"lengths\[0\]=-1",
        (100, 50): "sequence 1: cannot rewind from 100 to 50: a window retains",
    }.items():
        with pytest.raises((ValueError, RewindError), match=error):
            cache.rewind_each(lengths)
        assert_same(cache.snapshot(), before)


def test_recurrent_layers_are_rewound_by_equal_counts() -> None:
    cache = Cache(spec=CacheSpec((*parse("raw", 1).layers, RecurrentSpec())))
    assert cache.is_recurrent and not Cache(1).is_recurrent
    keys = torch.randn(2, 2, 10, 16)
    for _ in range(2):
        cache[0].append(keys, keys)
        cache[1].append(10, {"state": torch.randn(2, 3)})
        cache.checkpoint()
    with pytest.raises(RewindError, match="the same number of tokens in all sequences"):
        cache.rewind_each([10, 0])
    cache.rewind_each([10, 10])
    assert cache.lengths == [10, 10]


def test_padding_is_forgotten_with_all_tokens() -> None:
    model = build("llama")
    cache, ids = cache_for(model, "raw"), torch.tensor([[0, 0, 5], [3, 4, 5]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.rewind_each([0] * 2)
    model(torch.tensor([[5, 6], [7, 8]]), past_key_values=cache)
    assert cache.lengths == [2, 2]


def test_later_rewind_leaves_no_padding_to_a_sequence_rewound_alone() -> None:
    """Regression: its next tokens were swallowed as padding."""
    cache, keys = Cache(1), torch.randn(2, 2, 10, 16)
    cache[0].append(keys, keys, start=[3, 0])
    cache.rewind_each(torch.tensor([2, 10]))
    cache.rewind(4)
    assert cache.lengths == [0, 4]
    cache[0].append(keys[:, :, :2], keys[:, :, :2])
    assert cache.lengths == [2, 6]
    cache.rewind_each([0, 6])
    for to in (4, 3, 2):  # also where its old padding would end at the newest column
        cache.rewind(to)
    cache[0].append(keys[:, :, :1], keys[:, :, :1])
    assert cache.lengths == [1, 3]
    padded = Cache(1)
    padded[0].append(keys, keys, start=[3, 0])
    padded.rewind(2)  # within the padding, whose last column follows
    padded[0].append(keys[:, :, :2], keys[:, :, :2])
    assert padded.lengths == [1, 4]
