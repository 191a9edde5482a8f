"""What stands at the front of the package: `attach` for a block, `explain`, `plan` of a path."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import kvant
from hf.zoo import build
from kvant import checkpoints, demo
from kvant.hf import get_attachments
from kvant.models import layer_shapes


def test_every_public_name_is_there() -> None:
    for name in kvant.__all__:
        assert getattr(kvant, name).__name__.rpartition(".")[2] == name
    assert set(kvant.__all__) <= vars(kvant).keys()  # and looked up once
    assert set(kvant.__all__) <= set(dir(kvant))
    assert kvant.sizes.parse_size("1KiB") == 1024  # and modules, without an import of them
    with pytest.raises(AttributeError, match="module 'kvant' has no attribute 'nonsense'"):
        kvant.nonsense  # noqa: B018
    assert not hasattr(kvant, "nonsense.more") and not hasattr(kvant, "spec.")


@pytest.mark.parametrize("name", [name for name in kvant.__all__ if name.endswith("Spec")])
def test_type_hints_of_specs_resolve(name: str) -> None:
    hints = get_type_hints(getattr(kvant, name))
    assert name != "LayerSpec" or hints["dtype"] == torch.dtype | None


def test_a_model_is_attached_for_a_block() -> None:
    model = build("llama")
    with kvant.attach(model, "affine8", guard=False) as inside:
        assert inside is model and next(iter(get_attachments(model).values())).spec == "affine8"
    assert not get_attachments(model)


def test_a_block_leaves_what_was_attached_before() -> None:
    model = build("llama")
    kvant.attach(model, "raw")
    with pytest.raises(KeyError), kvant.attach(model, "affine8", guard=False):
        raise KeyError
    assert next(iter(get_attachments(model).values())).spec == "raw"
    with kvant.attach(model, "affine8", guard=False):
        kvant.detach(model)
    assert next(iter(get_attachments(model).values())).spec == "raw"
    kvant.detach(model)


def test_a_model_is_explained() -> None:
    model = build("llama")
    plain = kvant.explain(model)
    assert "raw" in plain
    with kvant.attach(model, "affine4", guard=False):
        assert "affine4" in kvant.explain(model)


def test_a_cache_is_explained() -> None:
    mixed = (*kvant.parse("affine4,window=256", 2).layers, kvant.SharedSpec(0), kvant.EmptySpec())
    group = kvant.GroupSpec((("rows", mixed[0]), ("state", kvant.RecurrentSpec())))
    cache = kvant.Cache(spec=kvant.CacheSpec((*mixed, kvant.RecurrentSpec(), group)))
    assert str(kvant.explain(cache)).splitlines() == [
        "layers 0-1: affine4,window=256,sinks=4; empty, so what reads it is not known yet",
        "layer 2: reads the rows of layer 0",
        "layer 3: remembers nothing",
        "layer 4: a state, which the model reads itself",
        "layer 5: rows: affine4,window=256,sinks=4; empty, so what reads it is not known yet"
        " beside state: a state, which the model reads itself",
    ]
    cache = kvant.Cache(2, "affine4", backend="reference")
    for layer in cache:
        layer.append(*torch.randn(2, 1, 2, 300, 64))
    assert kvant.explain(cache) == "layers 0-1: affine4; reference reads it"
    for first in (cache.fork(), kvant.merge([cache, cache])):
        assert kvant.explain(first) == kvant.explain(cache)


def test_what_a_cache_is_not_read_by_is_explained() -> None:
    cache = kvant.Cache(1, "raw")
    view = cache[0].append(*torch.randn(2, 1, 2, 10, 64))
    first, *refused = str(kvant.explain(view)).splitlines()
    backend = first.partition(":")[0]
    assert kvant.explain(cache) == "; ".join([f"layer 0: raw; {backend} reads it", *refused])


def test_a_session_and_its_cache_are_explained() -> None:
    model, tokenizer = checkpoints.load(None)
    session = kvant.Session(model, tokenizer, "affine4", template=False)
    list(session.send("import os\n", max_new_tokens=2))
    found = str(kvant.explain(session))
    assert "affine4" in found and found == str(kvant.explain(session.cache))
    assert "affine8" in str(kvant.explain(kvant.cache_for(model, "affine8")))


@pytest.mark.parametrize(("wrong", "name"), [(kvant.Cache, "Cache"), (3, "int"), ("raw", "str")])
def test_what_cannot_be_explained_is_refused(wrong: object, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} cannot be explained: give a view, a cache, "):
        kvant.explain(wrong)


@pytest.mark.parametrize("path", [demo.PATH, demo.PATH / "config.json", str(demo.PATH)])
def test_a_path_is_planned(path: str | Path) -> None:
    config = checkpoints.load_config(str(demo.PATH))
    assert kvant.plan(path, "affine8").nbytes == kvant.plan(config, "affine8").nbytes
    assert kvant.plan(path, "affine8").layers == tuple(layer_shapes(config))


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        kvant.plan(tmp_path)
    with pytest.raises(ValueError, match="No such file"):
        kvant.plan("nowhere.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="an object is needed"):
        kvant.plan(tmp_path)


def test_what_torch_was_seeded_with_counts() -> None:
    model, tokenizer = checkpoints.load(None)

    def drawn() -> list[int]:
        asked = {"temperature": 1.0, "max_new_tokens": 8}
        return [step.token for step in kvant.generate(model, tokenizer, "import ", **asked)]

    torch.manual_seed(3)
    first = drawn()
    other = drawn()
    torch.manual_seed(3)
    assert drawn() == first != other


def test_what_things_hold_is_in_their_repr() -> None:
    model, tokenizer = checkpoints.load(None)
    session = kvant.Session(model, tokenizer, "affine4", template=False)
    session.read("import os\n")
    assert repr(session).startswith("Session(affine4: 1 turn, ")
    assert repr(session).endswith(f" {kvant.sizes.format_size(session.cache.nbytes)})")
    with kvant.Engine(model, tokenizer, "affine8", max_bytes="1MiB") as engine:
        assert repr(engine).startswith("Engine(affine8: 0 running, 0 waiting, ")
        assert repr(engine).endswith(" of 1 MiB)")
    cache = kvant.Cache(2, "affine4,window=64,sinks=0")
    assert repr(cache) == "Cache(affine4,window=64,sinks=0: 2 layers, length 0, 0 B)"


def test_a_text_that_was_read_can_be_gone_back_to() -> None:
    model, tokenizer = checkpoints.load(None)
    session = kvant.Session(model, tokenizer, template=False)
    session.read("import os\nimport sys\n")
    said = session.tokens
    list(session.send("def ", max_new_tokens=4))
    session.rewind(session.turns[0].end)
    assert session.tokens == said and len(session.turns) == 1


def test_tokens_are_read_as_they_are() -> None:
    model, tokenizer = checkpoints.load(None)
    session, other = (kvant.Session(model, tokenizer, template=False) for _ in range(2))
    session.read(tokenizer.encode("import os\n"))
    other.read("import os\n")
    assert session.tokens == other.tokens
    with pytest.raises(kvant.PromptError, match="no tokens: there is nothing to read"):
        session.read("")
    assert len(session.turns) == 1 and session.tokens == other.tokens


def test_sizes_may_be_words() -> None:
    planned = kvant.plan(demo.PATH, "affine4")
    assert planned.largest_context("1MiB") == planned.largest_context(2**20)
