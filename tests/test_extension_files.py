"""Test that files and stored prefixes name the packages whose codecs and scores they use."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from foreign import RowSteps, uninstall_packages
from hf.zoo import build
from kvant import checkpoints
from kvant.cache.files import read_header
from kvant.prefixes.keys import make_root_key
from kvant.spec.packages import check_extensions_used, decode_extensions
from kvant.spec.tables import CODEC_TABLE
from test_extensions import Install, fill


def test_a_file_names_the_package_that_wrote_it(
    install: Install,
    tmp_path: Path,
) -> None:
    install()
    cache = fill(kvant.Cache(2, "steps/affine4,prune=keys:50%"))
    kvant.save(cache, tmp_path / "cache.kv")
    extensions = read_header(tmp_path / "cache.kv").extensions
    package = ("kvant-steps", "1.2")
    assert [tuple(each) for each in extensions] == [
        ("codec", "steps", package, None),
        ("score", "keys", package, None),
    ]
    loaded = kvant.load(tmp_path / "cache.kv")
    assert all(map(torch.equal, loaded[0].read(), cache[0].read()))
    uninstall_packages(tmp_path)
    message = "cache.kv uses the codec 'steps' of the package kvant-steps 1.2: pip install kvant-s"
    with pytest.raises(kvant.CacheFileError, match=message):
        kvant.load(tmp_path / "cache.kv")
    install(name="kvant-other", version="7")
    with pytest.raises(
        kvant.CacheFileError, match="but here it is of kvant-other 7: uninstall that; pip"
    ):
        kvant.load(tmp_path / "cache.kv")


def test_a_file_of_a_registered_codec_says_what_to_call(tmp_path: Path) -> None:
    kvant.register_codec("rowsteps", RowSteps)
    kvant.save(fill(kvant.Cache(1, "rowsteps")), tmp_path / "cache.kv")
    CODEC_TABLE._added.clear()
    with pytest.raises(kvant.CacheFileError, match=r"that a program registered: call kvant\.r"):
        kvant.load(tmp_path / "cache.kv")
    kvant.register_codec("rowsteps", RowSteps)
    assert kvant.load(tmp_path / "cache.kv").length == 200


def test_a_session_file_names_its_codec(tmp_path: Path) -> None:
    kvant.register_codec("rowsteps", RowSteps)
    model, tokenizer = checkpoints.load(None)
    session = kvant.Session(model, tokenizer, "rowsteps", template=False)
    list(session.send("import os\n" * 30, max_new_tokens=4))
    session.save(tmp_path / "chat.kv")
    again = kvant.Session.load(tmp_path / "chat.kv", model, tokenizer)
    assert again.tokens == session.tokens
    CODEC_TABLE._added.clear()
    with pytest.raises(kvant.CacheFileError, match="uses the codec 'rowsteps'"):
        kvant.Session.load(tmp_path / "chat.kv", model, tokenizer)


@pytest.mark.parametrize(
    "forged",
    [
        3,
        [3],
        [{"kind": "codec", "name": "steps"}],
        [{"kind": "store", "name": "steps", "package": None, "version": None}],
        [{"kind": [], "name": "steps", "package": None, "version": None}],
        [{"kind": "codec", "name": "a b", "package": None, "version": None}],
        [{"kind": "codec", "name": "steps", "package": "--index-url=x", "version": "1"}],
        [{"kind": "codec", "name": "steps", "package": "a b", "version": "1"}],
        [{"kind": "codec", "name": "steps", "package": "a", "version": None}],
        [{"kind": "codec", "name": "steps", "package": None, "version": "1"}],
    ],
)
def test_forged_extensions_are_refused(forged: Any) -> None:
    with pytest.raises(kvant.CacheFileError, match=r"^a.kv: invalid extensions in its header"):
        decode_extensions(forged, "a.kv")


def test_a_header_imports_nothing_that_its_spec_does_not_use(
    install: Install, tmp_path: Path
) -> None:
    module = install()
    listed = {"kind": "codec", "name": "steps", "package": "kvant-steps", "version": "1.1"}
    (extension,) = decode_extensions([listed], "a.kv")
    assert extension.package == ("kvant-steps", "1.1") and module not in sys.modules
    with pytest.raises(ValueError, match="its spec uses"):
        check_extensions_used([extension], kvant.parse("raw", 2))
    with pytest.raises(ValueError, match="its header names the extensions set"):
        check_extensions_used([], kvant.parse("steps", 2))


def test_a_registered_codec_does_not_read_files_of_a_package(
    install: Install, tmp_path: Path
) -> None:
    install({"codecs:steps": "Steps"})
    kvant.save(fill(kvant.Cache(1, "steps")), tmp_path / "package.kv")
    uninstall_packages(tmp_path)
    kvant.register_codec("steps", RowSteps)
    with pytest.raises(kvant.CacheFileError, match="but here a program registered it: do not"):
        kvant.load(tmp_path / "package.kv")
    kvant.save(fill(kvant.Cache(1, "steps")), tmp_path / "registered.kv")
    uninstall_packages(tmp_path)
    install({"codecs:steps": "Steps"})
    with pytest.raises(kvant.CacheFileError, match=r"but here it is of kvant-steps 1.2: uninstall"):
        kvant.load(tmp_path / "registered.kv")


def test_keys_of_prefixes_differ_by_package_version_and_code(
    install: Install, tmp_path: Path
) -> None:
    model, keys = build("llama"), list[bytes]()
    kvant.register_codec("steps", RowSteps)
    keys.append(make_root_key(model, kvant.parse("steps", 2)))
    for name, version in (("kvant-a", "1"), ("kvant-b", "1"), ("kvant-b", "2")):
        uninstall_packages(tmp_path)
        install({"codecs:steps": "Steps"}, name=name, version=version)
        keys.append(make_root_key(model, kvant.parse("steps", 2)))
    uninstall_packages(tmp_path)
    kvant.register_codec("steps", OtherSteps)
    keys.append(make_root_key(model, kvant.parse("steps", 2)))
    assert len({*keys}) == 5


@dataclass(frozen=True)
class OtherSteps(RowSteps):
    """Another codec with the fields of RowSteps."""

    frame = RowSteps.frame
