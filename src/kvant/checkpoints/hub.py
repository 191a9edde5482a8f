"""Look names up on the hub, and report errors of loading in one line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

SMOLLM2 = "smollm2"  # a model by name, which files.py finds in a package
HUB_TIMEOUT_S = 5.0
PROXY_AUTHENTICATION_REQUIRED = 407


@contextmanager
def report_loading_errors(checkpoint: str, flag: str) -> Iterator[dict[str, Any]]:
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
            missing = _is_not_cached(error)
            reason = cache_only.explain(reason, missing=missing)
            if missing and get_close_matches(checkpoint.lower(), [SMOLLM2]):
                reason += f"; nearest: {SMOLLM2}"
        raise ValueError(f"{flag} {checkpoint} cannot be loaded: {reason}") from error


@contextmanager
def report_gguf_errors(file: Path, flag: str) -> Iterator[None]:
    """Silence transformers, and report errors of a file in one line."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except Exception as error:  # transformers may raise any exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{flag} {file}: {reason}") from error


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
