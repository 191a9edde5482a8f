"""Models by name: the one inside the package, a folder, or a name on the hub.

What a folder lacks is said before anything of it is loaded, and by its own name: a host that finds
no tokenizer makes an empty one, and weights that are not there become random ones.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from kvant import demo
from kvant.devices import AUTO_DTYPE, parse_device, parse_dtype

CONFIG_NAME, INDEX_NAME = "config.json", "model.safetensors.index.json"
WEIGHTS_PATTERN = "*.safetensors"
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "*.model",
    "tekken.json",
)  # any of them may be all there is
HUB_TIMEOUT_S = 5.0  # for the hub to answer at all
PROXY_LOGIN = 407  # the status of a proxy that wants a login
LFS_POINTER_PREFIX = (
    b"version https://git-lfs"  # what Git leaves where a large file was not fetched
)


def load(
    name: str | None,
    *,
    flag: str = "--model",
    trust_code: bool = False,
    device: str | None = None,
    dtype: str = AUTO_DTYPE,
) -> tuple[Any, Any]:
    """A model and its tokenizer: safetensors only, and none of its own code unless asked.

    Without a device a GPU is taken if there is one; `auto` is the dtype of the checkpoint.
    """
    from transformers import AutoTokenizer

    place, numbers = parse_device(device), parse_dtype(dtype)
    check_checkpoint(name, flag=flag)
    where = _resolve_checkpoint(name, flag)
    with _report_loading_errors(where, flag) as options:
        options |= {"trust_remote_code": trust_code}
        model = _load_pretrained(where, numbers, options)
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    return model.to(place), tokenizer


def load_model(
    name: str | None,
    *,
    flag: str = "--model",
    trust_code: bool = False,
    device: str | None = None,
    dtype: str = AUTO_DTYPE,
) -> Any:
    """The model alone."""
    place, numbers = parse_device(device), parse_dtype(dtype)
    check_checkpoint(name, flag=flag, tokenizer=False)
    where = _resolve_checkpoint(name, flag)
    with _report_loading_errors(where, flag) as options:
        model = _load_pretrained(where, numbers, options | {"trust_remote_code": trust_code})
    return model.to(place)


def _load_pretrained(where: str, dtype: Any, options: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(
        where, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
    )
    if found["missing_keys"]:
        raise ValueError(f"it has no weights for {', '.join(sorted(found['missing_keys'])[:3])}")
    return model.eval()


def load_config(name: str | None) -> Any:
    """What a model says of itself, without its weights."""
    from transformers import AutoConfig

    where = _resolve_checkpoint(name, "--model")
    with _report_loading_errors(where, "--model") as options:
        return AutoConfig.from_pretrained(where, **options)


def read_config(path: str | PathLike[str]) -> Any:
    """What a config.json says, or a folder with one, or a name on the hub."""
    place = Path(path).expanduser()
    file = place / CONFIG_NAME if place.is_dir() else place
    if isinstance(path, str) and not place.exists() and place.suffix != ".json":
        return load_config(path)
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(told, dict):
        raise ValueError(f"{file}: an object is needed, as a {CONFIG_NAME} is")
    return told


def find_config_file(name: str | None) -> Path | None:
    """Where a folder says what its model is; None of a name on the hub."""
    folder = Path(_resolve_checkpoint(name, "--model"))
    return folder / CONFIG_NAME if folder.is_dir() else None


def check_checkpoint(name: str | None, *, flag: str = "--model", tokenizer: bool = True) -> None:
    """Is all there that loading this folder takes? A name on the hub is not looked up."""
    folder = Path(_resolve_checkpoint(name, flag))
    if not folder.is_dir():
        return
    if tokenizer and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_PATTERNS):
        raise ValueError(f"{flag} {folder}: there is no tokenizer in it (tokenizer.json)")
    for file in _list_weight_files(folder, flag):
        _check_weight_file(file, flag)


def _resolve_checkpoint(name: str | None, flag: str) -> str:
    """The folder of that name with a configuration in it, or a name on the hub."""
    if name is None:
        return str(demo.PATH)
    folder = Path(name).expanduser()
    if folder.suffix == ".gguf" or (folder.is_dir() and _has_only_gguf(folder)):
        raise ValueError(
            f"{flag} {name}: GGUF is not read: name the folder of safetensors that it was made "
            "from, or its name on the hub"
        )
    if folder.is_dir():
        if not (folder / CONFIG_NAME).is_file():
            raise ValueError(f"{flag} {name}: there is no {CONFIG_NAME} in this folder")
        return str(folder)
    if folder.exists():
        raise ValueError(
            f"{flag} {name}: a file; the folder with {CONFIG_NAME} and weights is needed"
        )
    if name.startswith((".", "/", "~")):
        raise ValueError(f"{flag} {name}: there is no such folder")
    return name


def _has_only_gguf(folder: Path) -> bool:
    return any(folder.glob("*.gguf")) and not any(folder.glob(WEIGHTS_PATTERN))


def _list_weight_files(folder: Path, flag: str) -> list[Path]:
    """The files of weights, all of which are there."""
    index, there = folder / INDEX_NAME, sorted(folder.glob(WEIGHTS_PATTERN))
    if not there:
        kept = "pickled weights alone" if any(folder.glob("*.bin")) else "no weights"
        raise ValueError(f"{flag} {folder}: there are {kept} in it: {WEIGHTS_PATTERN} is needed")
    if not index.is_file():
        if (
            not any("-of-" in file.name for file in there)
            or (folder / "model.safetensors").exists()
        ):
            return there
        raise ValueError(
            f"{flag} {folder}: its weights are in parts, and {INDEX_NAME} is not there"
        )
    try:
        parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{flag} {folder}: {INDEX_NAME} is damaged: {error}") from error
    missing = [part for part in parts if not (folder / part).is_file()]
    if missing:
        raise ValueError(
            f"{flag} {folder}: {len(missing)} of its {len(parts)} parts are not there: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
        )
    return [folder / part for part in parts]


def _check_weight_file(file: Path, flag: str) -> None:
    """Its header is read, which tells how long it has to be."""
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER_PREFIX)) == LFS_POINTER_PREFIX:
            raise ValueError(
                f"{flag} {file}: a pointer of Git LFS: fetch the weights (git lfs pull)"
            )
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{flag} {file} is damaged or not whole: {error}") from error


@contextmanager
def _report_loading_errors(checkpoint: str, flag: str) -> Iterator[dict[str, Any]]:
    """Load quietly, with the options yielded; an error is one line."""
    from transformers.utils import logging as host_logging

    host_logging.disable_progress_bar()
    host_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    cache_only = None if Path(checkpoint).is_dir() else _ask_hub(checkpoint, flag)
    try:
        yield {"local_files_only": True} if cache_only else {}
    except Exception as error:  # a broken checkpoint makes its readers raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if cache_only:
            reason = cache_only.explain(reason, missing=_is_not_cached(error))
        raise ValueError(f"{flag} {checkpoint} cannot be loaded: {reason}") from error


class _CacheOnly(NamedTuple):
    """Why only the cache of the hub is read, and what helps where it lacks a model."""

    cause: str
    way_out: str = "name a folder, or load it once with a network"

    def explain(self, reason: str, *, missing: bool) -> str:
        """Return the reason of a load error; `missing`: a file is not in the cache."""
        if not missing:
            return f"{reason} (only the cache was read: {self.cause})"
        return (
            f"it is no folder, {self.cause}, and the cache lacks it or a part of it: {self.way_out}"
        )


def _is_not_cached(error: BaseException | None) -> bool:
    """Whether an error was caused by a file that the cache of the hub lacks."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while error is not None and not isinstance(error, LocalEntryNotFoundError):
        error = error.__cause__
    return error is not None


def _ask_hub(name: str, flag: str) -> _CacheOnly | None:
    """Ask the hub for a name once; None where its files can be asked for.

    transformers tries a hub that is unreachable many times: nothing is asked a second time.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return _CacheOnly("HF_HUB_OFFLINE is set")
    print(f"{flag} {name}: no such folder, looking it up on {constants.ENDPOINT}", file=sys.stderr)
    no_model = f"no such model on {constants.ENDPOINT}"
    way_out = "check the name, or log in (hf auth login) where it is private"
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except HFValidationError as error:
        raise ValueError(
            f"{flag} {name}: there is no such folder, and {no_model}: {way_out}"
        ) from error
    except RepositoryNotFoundError:  # or a private one without a login, which the cache may have
        return _CacheOnly(f"there is {no_model}", way_out)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status >= 500 or status == PROXY_LOGIN:  # asked for a file, it answers the same
            return _CacheOnly(f"the hub or a proxy answers with status {status}")
        return None  # what it refuses is said where a file is asked for
    except Exception:  # its clients have errors of their own for each way of not connecting
        return _CacheOnly("the hub cannot be reached")
    return None


def make_meta_model(config: Any) -> Any:
    """The modules of a model, without memory for their weights."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModel):
        if type(config) in auto._model_mapping:
            with torch.device("meta"):
                return auto.from_config(config).eval()
    raise ValueError(f"--model: transformers has no model for {type(config).__name__}")
