"""Test checkpoints by name: missing parts are reported before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from huggingface_hub.errors import HFValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvant import checkpoints, demo
from kvant.checkpoints import files, loader

INDEX = files.INDEX_NAME


@pytest.fixture(scope="module")
def complete_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in several files."""
    folder = tmp_path_factory.mktemp("complete_folder")
    model = AutoModelForCausalLM.from_pretrained(demo.PATH)
    model.save_pretrained(folder, max_shard_size="3MB")
    AutoTokenizer.from_pretrained(demo.PATH).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(complete_folder: Path, tmp_path: Path) -> Path:
    """Return a copy to break."""
    return Path(shutil.copytree(complete_folder, tmp_path / "model"))


def list_parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def remove_tokenizer(folder: Path) -> None:
    """Regression: transformers made an empty tokenizer, and the model continued nothing."""
    for file in folder.glob("tokenizer*"):
        file.unlink()


def remove_weights(folder: Path) -> None:
    for file in list_parts(folder):
        file.unlink()


def pickle_weights(folder: Path) -> None:
    remove_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def add_gguf(folder: Path) -> None:
    remove_weights(folder)
    (folder / "q8.gguf").write_bytes(b"GGUF")


def replace_by_pointer(folder: Path) -> None:
    list_parts(folder)[0].write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")


def truncate_weights(folder: Path) -> None:
    list_parts(folder)[0].write_bytes(list_parts(folder)[0].read_bytes()[:-1])


def remove_one_weight(folder: Path) -> None:
    """Regression: missing weights were silently random."""
    file = list_parts(folder)[0]
    tensors = load_file(file)
    name = next(iter(tensors))
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_tokenizer, "it has no tokenizer"),
        (remove_weights, "it has no weights"),
        (pickle_weights, "it has only pickled weights"),
        (add_gguf, "name one of its GGUF files, such as "),
        (replace_by_pointer, "a pointer of Git LFS"),
        (truncate_weights, "-00001-of-00005.safetensors is corrupt or incomplete"),
        (remove_one_weight, "cannot be loaded: it has no weights for "),
        (lambda folder: (folder / "config.json").unlink(), "this folder has no config.json"),
        (lambda folder: (folder / INDEX).unlink(), f"sharded, and {INDEX} is missing"),
        (lambda folder: (folder / INDEX).write_text("{}"), f"{INDEX} is corrupt"),
        (
            lambda folder: list_parts(folder)[1].unlink(),
            "1 of its 5 shards are missing: model-00002",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "not a valid JSON file"),
    ],
    ids=range(12),
)
def test_missing_files_of_a_folder_are_named(
    spoil: Callable[[Path], object], message: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(ValueError, match=r"^--model \S+/model") as error:
        checkpoints.load(str(folder), device="cpu")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_complete_folder_is_loaded(folder: Path) -> None:
    model, tokenizer = checkpoints.load(str(folder), device="cpu")
    assert not model.training and tokenizer.encode("import os")


def test_a_draft_needs_no_tokenizer(folder: Path) -> None:
    remove_tokenizer(folder)
    assert checkpoints.load_model(str(folder), flag="--draft", device="cpu").num_parameters()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.gguf", "no such file"),
        ("a.txt", "this is a file; name the folder with config.json and weights"),
        ("./nowhere", "no such folder"),
    ],
)
def test_missing_folder_is_named(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("")
    with pytest.raises(ValueError, match=f"^--model {name}: {message}"):
        checkpoints.load(name)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtype_can_be_set(dtype: str) -> None:
    model, _ = checkpoints.load(None, device="cpu", dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert checkpoints.load(None)[0].dtype == torch.bfloat16


def test_model_is_loaded_on_the_given_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU uses `meta` instead."""
    monkeypatch.setattr(loader, "parse_device", lambda name: torch.device("meta"))
    assert checkpoints.load(None, device="cuda")[0].device.type == "meta"


@pytest.fixture
def cached_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the files of some/model in a cache of the hub."""
    repository, revision = tmp_path / "models--some--model", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return Path(shutil.copytree(demo.PATH, repository / "snapshots" / revision))


def change_config(folder: Path, **entries: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda files: change_config(files, model_type="unknown"), "has model type `unknown` but"),
        (
            lambda files: change_config(
                files, model_type="unknown", auto_map={"AutoConfig": "code.Config"}
            ),
            "contains custom code",
        ),
        (lambda files: (files / "model.safetensors").unlink(), "have a file named model.safe"),
    ],
    ids=["unknown type", "own code", "no weights"],
)
def test_cause_of_a_load_error_is_kept_offline(
    spoil: Callable[[Path], object],
    reason: str,
    cached_files: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: each was reported as missing from a cache that had it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spoil(cached_files)
    with pytest.raises(
        ValueError, match=r"\(only the local cache was read: HF_HUB_OFFLINE is"
    ) as error:
        checkpoints.load("some/model", device="cpu")
    assert reason in str(error.value) and "lacks" not in str(error.value)


class Hub:
    """A hub with a fixed answer that counts requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.asked: list[str] = []

        def model_info(api: object, name: str, *, timeout: float) -> None:
            self.asked.append(name)
            raise error

        def refuse(*args: object, **named: object) -> None:
            raise AssertionError("a second request")

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
        monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", refuse)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.mark.parametrize(
    "read", [checkpoints.load, checkpoints.load_model, checkpoints.read_config]
)
def test_unreachable_hub_is_queried_once(
    read: Callable[[str], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: transformers retried again and again: 27 s of silence for a mistyped folder."""
    hub = Hub(monkeypatch, ConnectionError("no network"))
    with pytest.raises(
        ValueError, match=r"some/model cannot be loaded: .* cannot be reached, .*name a folder"
    ):
        read("some/model")
    assert hub.asked == ["some/model"]
    assert capsys.readouterr().err.startswith("--model some/model: no such folder, looking it up")


def test_nearest_name_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, ConnectionError("no network"))
    with pytest.raises(ValueError, match=r"nearest: smollm2$"):
        checkpoints.load("smollm")
    with pytest.raises(ValueError, match=r"load it once with a network$"):
        checkpoints.load("some/model")


def make_http_error(error_name: str, status: int) -> Exception:
    """Return an error of huggingface_hub for a hub with this status."""
    from huggingface_hub import errors

    response = SimpleNamespace(headers={}, status_code=status, request=None)
    return cast(Exception, getattr(errors, error_name)("refused", response=response))


@pytest.mark.parametrize(
    "error",
    [HFValidationError("no name"), make_http_error("RepositoryNotFoundError", 401)],
    ids=["no name", "no model"],
)
def test_unknown_hub_name_raises(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, error)
    with pytest.raises(
        ValueError, match=r"--model some/model.* no such model on https?://.*log in"
    ):
        checkpoints.load("some/model")
    assert hub.asked == ["some/model"]


def test_a_private_model_is_loaded_from_the_cache_without_a_login(
    cached_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub answers 401 as if there were no such model."""
    hub = Hub(monkeypatch, make_http_error("RepositoryNotFoundError", 401))
    model, tokenizer = checkpoints.load("some/model", device="cpu")
    assert model.num_parameters() and tokenizer.encode("import os")
    assert hub.asked == ["some/model"]


@pytest.mark.parametrize("status", [407, 500, 503])
def test_failing_hub_is_queried_once(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: transformers repeated each request: 3 in all for a 503."""
    hub = Hub(monkeypatch, make_http_error("HfHubHTTPError", status))
    with pytest.raises(
        ValueError, match=f"answers with status {status}, and the local cache lacks some of it"
    ):
        checkpoints.load("some/model")
    assert hub.asked == ["some/model"]


def test_offline_mode_sends_no_hub_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub(monkeypatch, ConnectionError("no network"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match="HF_HUB_OFFLINE is set, and the local cache lacks some of it"
    ):
        checkpoints.load("some/model")
    assert not hub.asked and not capsys.readouterr().err
