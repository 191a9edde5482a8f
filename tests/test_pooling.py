"""Test what a checkpoint's files declare of its pooling, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from kvant import checkpoints
from kvant.checkpoints.pooling import UNDECLARED_MESSAGE, Pooling, PoolingError, read_pooling

TRANSFORMER = {
    "idx": 0,
    "name": "0",
    "path": "",
    "type": "sentence_transformers.models.Transformer",
}
POOLING = {
    "idx": 1,
    "name": "1",
    "path": "1_Pooling",
    "type": "sentence_transformers.models.Pooling",
}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
MODES = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")


def make_config(*modes: str) -> dict[str, Any]:
    """Return the config of a Pooling module as sentence-transformers saves it."""
    flags = {f"pooling_mode_{name}": name in modes for name in MODES}
    return {"word_embedding_dimension": 64, **flags, "include_prompt": True}


def write_pooling(folder: Path, config: Any, *more: Any) -> Path:
    """Write the files of sentence-transformers to the folder of a checkpoint."""
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "modules.json").write_text(json.dumps([TRANSFORMER, POOLING, *more]))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "more", "expected"),
    [
        (make_config("mean_tokens"), [], Pooling("mean")),
        (make_config("lasttoken"), [NORMALIZE], Pooling("last", normalize=True)),
        ({"pooling_mode": "lasttoken"}, [], Pooling("last")),
        ({"pooling_mode": "mean"}, [NORMALIZE], Pooling("mean", normalize=True)),
    ],
)
def test_folder_declares_its_pooling(
    config: Any, more: Any, expected: Pooling, tmp_path: Path
) -> None:
    assert read_pooling(write_pooling(tmp_path, config, *more)) == expected
    assert checkpoints.find_pooling(str(tmp_path)).require() == expected


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (make_config("cls_token"), [], "pooling is mode cls_token: .* mean and last token"),
        (make_config("weightedmean_tokens"), [], "mode weightedmean_tokens"),
        (make_config("cls_token", "mean_tokens"), [], "turns on cls_token, mean_tokens: exactly"),
        (make_config(), [], "turns on no mode: exactly one"),
        ({"pooling_mode": ["mean"]}, [], r"mode \['mean'\]"),
        ([], [], "1_Pooling/config.json is corrupt: a JSON object"),
        (make_config("lasttoken"), [DENSE], "lists .*models.Dense: .* for Transformer, Pooling"),
        (make_config("lasttoken"), [NORMALIZE, NORMALIZE], "Normalize, .*Normalize: embeddings"),
        (make_config("lasttoken"), [{"type": "custom.Normalize", "path": ""}], "custom.Normalize"),
    ],
)
def test_other_poolings_are_refused(config: Any, more: Any, message: str, tmp_path: Path) -> None:
    write_pooling(tmp_path, config, *more)
    with pytest.raises(PoolingError, match=message):
        checkpoints.find_pooling(str(tmp_path)).require()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("modules.json", "{", "modules.json is corrupt: it is not JSON"),
        ("modules.json", "[" * 100_000, "modules.json is corrupt: it is not JSON"),
        ("modules.json", "[]", "lists no modules"),
        ("modules.json", "7", "modules.json is corrupt: a list"),
        ("modules.json", '["Pooling"]', "modules.json is corrupt: a list"),
        ("modules.json", '[{"type": "Pooling"}]', "modules.json is corrupt: a list"),
        ("1_Pooling/config.json", "\udcff", "config.json is corrupt: it is not JSON"),
        ("1_Pooling/config.json", None, "1_Pooling/config.json cannot be read: No such file"),
    ],
)
def test_corrupt_files_are_refused(
    file: str, text: str | None, message: str, tmp_path: Path
) -> None:
    path = write_pooling(tmp_path, make_config("lasttoken")) / file
    path.unlink() if text is None else path.write_bytes(text.encode(errors="surrogateescape"))
    declared = checkpoints.find_pooling(str(tmp_path))
    with pytest.raises(PoolingError, match=message):
        declared.require()
    assert str(tmp_path) not in declared.refusal  # clients read it


def test_changes_of_texts_are_refused(tmp_path: Path) -> None:
    folder = write_pooling(tmp_path, make_config("mean_tokens") | {"include_prompt": False})
    with pytest.raises(PoolingError, match="leaves out prompts"):
        read_pooling(folder)
    write_pooling(tmp_path, make_config("mean_tokens"))
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(PoolingError, match="do_lower_case, which is not supported"):
        read_pooling(folder)
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": false}')
    assert read_pooling(folder) == Pooling("mean")


@pytest.mark.parametrize("path", ["", ".", "..", "../1_Pooling", "/etc"])
def test_no_other_folder_is_read(path: str, tmp_path: Path) -> None:
    folder = write_pooling(tmp_path / "model", make_config("mean_tokens"))
    write_pooling(tmp_path, make_config("mean_tokens"))
    (folder / "modules.json").write_text(json.dumps([TRANSFORMER, POOLING | {"path": path}]))
    with pytest.raises(PoolingError, match="is not a folder of the checkpoint"):
        read_pooling(folder)


def test_a_model_without_the_files_declares_none() -> None:
    declared = checkpoints.find_pooling(None)
    assert declared.pooling is None and declared.refusal == UNDECLARED_MESSAGE
    with pytest.raises(PoolingError, match="this model declares no pooling: "):
        declared.require()


def test_hub_name_is_read_from_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("asked"))
    assert checkpoints.find_pooling("kvant-test/none").refusal == UNDECLARED_MESSAGE
    repository = tmp_path / "models--kvant-test--one"
    write_pooling(repository / "snapshots" / "1234", make_config("lasttoken"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1234")
    assert checkpoints.find_pooling("kvant-test/one").pooling == Pooling("last")
    assert checkpoints.find_pooling("kvant-test/one:none.gguf").refusal == UNDECLARED_MESSAGE


GGUF_CASES = [
    (1, Pooling("mean", normalize=True)),
    (3, Pooling("last", normalize=True)),
    (2, "pooling_type 2 .cls.: embeddings are computed for mean and last token"),
    (0, "pooling_type 0 .none."),
    (9, "pooling_type 9 .unknown."),
    (None, "this model declares no pooling"),
]


@pytest.mark.parametrize(("number", "expected"), GGUF_CASES)
def test_gguf_file_declares_its_pooling(
    number: int | None, expected: Pooling | str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="pip install 'kvant[gguf]'")
    from gguf_files import make_model, write_file

    path = tmp_path / "one.gguf"
    extra = {} if number is None else {"qwen3.pooling_type": number}
    write_file(path, "qwen3", make_model("qwen3"), "Q8_0", **extra)
    declared = checkpoints.find_pooling(str(path))
    if isinstance(expected, Pooling):
        assert declared.require() == expected
    else:
        with pytest.raises(PoolingError, match=expected):
            declared.require()
