"""Test unsupported uses of a cache: pickling and transformers calls raise one line with the
alternative.
"""

from __future__ import annotations

import copy
import pickle

import pytest

import kvant


def test_cache_cannot_be_pickled() -> None:
    for dumped in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=r"kvant\.save\(cache, path\).*cache\.fork\(\)"):
            dumped(kvant.Cache(2, "affine8"))


def test_transformers_method_names_give_the_kvant_alternative() -> None:
    cache = kvant.Cache(2)
    with pytest.raises(AttributeError, match=r"no 'get_seq_length'; .* kvant\.load\(path, model\)"):
        cache.get_seq_length()  # type: ignore[attr-defined]
    assert not hasattr(cache, "is_compileable")


def test_public_names_are_listed_before_first_use() -> None:
    assert set(kvant.__all__) <= set(dir(kvant))
