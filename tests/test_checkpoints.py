"""Checkpoints by name: what one lacks is said by its own name, before anything is loaded."""

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

INDEX = checkpoints.INDEX_NAME


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in parts."""
    folder = tmp_path_factory.mktemp("whole")
    model = AutoModelForCausalLM.from_pretrained(demo.PATH)
    model.save_pretrained(folder, max_shard_size="3MB")
    AutoTokenizer.from_pretrained(demo.PATH).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """One to break."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def no_tokenizer(folder: Path) -> None:
    """The host made an empty one, and the model continued nothing."""
    for file in folder.glob("tokenizer*"):
        file.unlink()


def no_weights(folder: Path) -> None:
    for file in parts(folder):
        file.unlink()


def pickled(folder: Path) -> None:
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def gguf(folder: Path) -> None:
    no_weights(folder)
    (folder / "q8.gguf").write_bytes(b"GGUF")


def a_pointer(folder: Path) -> None:
    parts(folder)[0].write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")


def cut_short(folder: Path) -> None:
    parts(folder)[0].write_bytes(parts(folder)[0].read_bytes()[:-1])


def a_weight_less(folder: Path) -> None:
    """Weights that are not there were random ones, and nothing was said."""
    file = parts(folder)[0]
    tensors = load_file(file)
    name = next(iter(tensors))
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (no_tokenizer, "there is no tokenizer in it"),
        (no_weights, "there are no weights in it"),
        (pickled, "there are pickled weights alone in it"),
        (gguf, "GGUF is not read: name the folder of safetensors"),
        (a_pointer, "a pointer of Git LFS"),
        (cut_short, "-00001-of-00005.safetensors is damaged or not whole"),
        (a_weight_less, "cannot be loaded: it has no weights for "),
        (lambda folder: (folder / "config.json").unlink(), "there is no config.json"),
        (lambda folder: (folder / INDEX).unlink(), f"in parts, and {INDEX} is not there"),
        (lambda folder: (folder / INDEX).write_text("{}"), f"{INDEX} is damaged"),
        (lambda folder: parts(folder)[1].unlink(), "1 of its 5 parts are not there: model-00002"),
        (lambda folder: (folder / "config.json").write_text("{"), "not a valid JSON file"),
    ],
    ids=range(12),
)
def test_what_a_folder_lacks_is_named(
    spoil: Callable[[Path], object], told: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(ValueError, match=r"^--model \S+/model") as error:
        checkpoints.load(str(folder), device="cpu")
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_whole_one_is_loaded(folder: Path) -> None:
    model, tokenizer = checkpoints.load(str(folder), device="cpu")
    assert not model.training and tokenizer.encode("import os")


def test_a_draft_needs_no_tokenizer(folder: Path) -> None:
    no_tokenizer(folder)
    assert checkpoints.load_model(str(folder), flag="--draft", device="cpu").num_parameters()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a.gguf", "GGUF is not read"),
        ("a.txt", "a file; the folder with config.json and weights is needed"),
        ("./nowhere", "there is no such folder"),
    ],
)
def test_what_is_no_folder_is_named(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("")
    with pytest.raises(ValueError, match=f"^--model {name}: {told}"):
        checkpoints.load(name)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_dtype_can_be_told(dtype: str) -> None:
    model, _ = checkpoints.load(None, device="cpu", dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert checkpoints.load(None)[0].dtype == torch.bfloat16


def test_a_model_is_loaded_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no GPU here: `meta` stands for one."""
    monkeypatch.setattr(checkpoints, "parse_device", lambda name: torch.device("meta"))
    assert checkpoints.load(None, device="cuda")[0].device.type == "meta"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of some/model in a cache of the hub."""
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
def test_the_cause_of_a_load_error_is_kept_without_a_network(
    spoil: Callable[[Path], object], reason: str, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was said to be missing from a cache that had it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spoil(cached)
    with pytest.raises(ValueError, match=r"\(only the cache was read: HF_HUB_OFFLINE is") as error:
        checkpoints.load("some/model", device="cpu")
    assert reason in str(error.value) and "lacks" not in str(error.value)


class Hub:
    """A hub that answers every question in one way, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.asked: list[str] = []

        def model_info(api: object, name: str, *, timeout: float) -> None:
            self.asked.append(name)
            raise error

        def refuse(*given: object, **named: object) -> None:
            raise AssertionError("a second request")

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
        monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", refuse)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.mark.parametrize(
    "read", [checkpoints.load, checkpoints.load_model, checkpoints.read_config]
)
def test_a_hub_that_cannot_be_reached_is_asked_once(
    read: Callable[[str], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """transformers asked it again and again: 27 s of silence for a folder with a typing error."""
    hub = Hub(monkeypatch, ConnectionError("no network"))
    with pytest.raises(
        ValueError, match=r"some/model cannot be loaded: .* cannot be reached, .*name a folder"
    ):
        read("some/model")
    assert hub.asked == ["some/model"]
    assert capsys.readouterr().err.startswith("--model some/model: no such folder, looking it up")


def http_error(kind: str, status: int) -> Exception:
    """An error of huggingface_hub, for a hub that answers with this status."""
    from huggingface_hub import errors

    response = SimpleNamespace(headers={}, status_code=status, request=None)
    return cast(Exception, getattr(errors, kind)("refused", response=response))


@pytest.mark.parametrize(
    "error",
    [HFValidationError("no name"), http_error("RepositoryNotFoundError", 401)],
    ids=["no name", "no model"],
)
def test_a_name_that_the_hub_does_not_have_is_an_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch, error)
    with pytest.raises(
        ValueError, match=r"--model some/model.* no such model on https?://.*log in"
    ):
        checkpoints.load("some/model")
    assert hub.asked == ["some/model"]


def test_a_private_model_is_loaded_from_the_cache_without_a_login(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub answers 401 as if there were no such model."""
    hub = Hub(monkeypatch, http_error("RepositoryNotFoundError", 401))
    model, tokenizer = checkpoints.load("some/model", device="cpu")
    assert model.num_parameters() and tokenizer.encode("import os")
    assert hub.asked == ["some/model"]


@pytest.mark.parametrize("status", [407, 500, 503])
def test_a_hub_that_fails_is_asked_once(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers repeated each request: 3 in all for a 503."""
    hub = Hub(monkeypatch, http_error("HfHubHTTPError", status))
    with pytest.raises(ValueError, match=f"answers with status {status}, and the cache lacks it"):
        checkpoints.load("some/model")
    assert hub.asked == ["some/model"]


def test_nothing_is_asked_where_the_hub_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub(monkeypatch, ConnectionError("no network"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set, and the cache lacks it"):
        checkpoints.load("some/model")
    assert not hub.asked and not capsys.readouterr().err
