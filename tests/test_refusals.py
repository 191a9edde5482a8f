"""What a cache is not: a pickle, a cache of transformers. One line says what to write instead."""

from __future__ import annotations

import copy
import pickle

import pytest

import kvant


def test_a_cache_is_not_pickled() -> None:
    for dumped in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=r"kvant\.save\(cache, path\).*cache\.fork\(\)"):
            dumped(kvant.Cache(2, "affine8"))


def test_what_a_model_of_transformers_asks_it_for_is_answered_with_what_it_takes() -> None:
    cache = kvant.Cache(2)
    with pytest.raises(AttributeError, match=r"no 'get_seq_length'; .* kvant\.load\(path, model\)"):
        cache.get_seq_length()  # type: ignore[attr-defined]
    assert not hasattr(cache, "is_compileable")


def test_the_public_names_are_listed_before_they_are_asked_for() -> None:
    assert set(kvant.__all__) <= set(dir(kvant))
