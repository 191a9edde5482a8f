"""A cache in a file: safetensors, canonical rows, the spec in the header, a checksum over it all.

A file is written beside its name and moved there when it is complete. One that is not ours, is of
another version, or differs by a byte is refused before any of it is loaded. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvant.cache.cache import Cache
from kvant.cache.contents import iterate_leaves
from kvant.cache.snapshot import NUMBERS_KEY, TABLES_KEY
from kvant.contracts import Snapshot, Tiles
from kvant.errors import CacheError, CacheFileError, name_path
from kvant.page_table import LENGTH, PADDING
from kvant.recipes import CacheSpec, LayerSpec
from kvant.spec import from_json, to_json
from kvant.spec.headers import reject_duplicate_keys

METADATA_KEY = (
    "kvant-cache"  # the one entry of the header's metadata: JSON, so that bytes are the same
)
FORMAT_VERSION = 2
BLANK_CHECKSUM = "0" * 64  # stands for the checksum while the checksum is taken
CHECKSUM_MARK = rb"\"checksum\": \""  # as it stands in JSON inside JSON
MAX_HEADER_BYTES = 100 << 20  # what safetensors itself accepts
MAX_INTEGER = 1 << 53  # what any JSON reader keeps; tensors count further than that
MAX_OPEN_PAGE_BYTES = (
    1 << 28
)  # bytes of open pages that loading may take, however few rows they hold
MAX_OPEN_PAGE_FACTOR = (
    1 << 12
)  # or so many times the bytes of the rows: one row in each page of so many
READ_CHUNK_BYTES = 1 << 22


class Storable(Protocol):
    """What can be saved: a `Cache`, or a host's that has one."""

    @property
    def spec(self) -> CacheSpec: ...
    def shared_snapshot(self) -> Snapshot: ...


class FileTensor(NamedTuple):
    """One tensor of a file, as its header describes it."""

    dtype: str  # in the words of safetensors: F16, U8
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class CacheFileHeader:
    """What a file says of itself before any of its tensors are read."""

    spec: CacheSpec
    numbers: Mapping[str, int]
    about: Mapping[str, Any]
    tensors: Mapping[str, FileTensor]
    padded_lengths: tuple[
        int, ...
    ]  # tokens of each sequence, its padding included, if rows are stored
    version: int = FORMAT_VERSION

    def count_key_heads(self, name: str) -> int:
        """Of the layer that a tensor of rows [rows, H, D] is of: they may lie apart."""
        return self.tensors[name].shape[1] * _get_tables_per_sequence(self.numbers, name)


@dataclass(frozen=True)
class SavedCache:
    """What a file holds: a cache, and whatever its writer said about it."""

    spec: CacheSpec
    snapshot: Snapshot
    about: Mapping[str, Any] = field(default_factory=dict)


def save(
    cache: Storable,
    path: str | os.PathLike[str],
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a cache to a file; an older file of that name stays until the new one is whole.

    `about` is any JSON, for `read` to give back.

    >>> cache = kvant.cache_for(model, "affine4")
    >>> ids = model.generate(**inputs, cache=cache, max_new_tokens=4)
    >>> kvant.save(cache, "chat.kv")
    >>> kvant.load("chat.kv", model).get_seq_length() == cache.get_seq_length()
    True
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: there is no folder {target.parent}")
    held = cache.shared_snapshot()
    header = {
        "version": FORMAT_VERSION,
        "checksum": BLANK_CHECKSUM,
        "spec": json.loads(to_json(cache.spec)),
        "numbers": dict(held.numbers),
    }
    if about:
        header["about"] = dict(about)
    tensors = {name: tensor.contiguous() for name, tensor in held.tensors.items()}
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with name_path(target):
            _write_file(tensors, beside, header)
            beside.replace(target)
    finally:
        with suppress(OSError):  # a read-only disk refuses this, too
            beside.unlink(missing_ok=True)


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    tiles: Tiles | None = None,
) -> Cache:
    """The cache in a file, in memory of its own."""
    saved = read(path, device=device)
    with convert_errors(path):
        cache = Cache(None, saved.spec, tiles=tiles)
        cache.restore(saved.snapshot)
    return cache


@contextmanager
def convert_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """What does not fit within is the file's fault, and said of it."""
    try:
        yield
    except (CacheError, MemoryError, RuntimeError, ValueError) as error:
        raise CacheFileError(f"{path}: not a cache that can be restored: {error}") from error


def read(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> SavedCache:
    """What is in a file, for a cache of the same spec to `restore`."""
    source = Path(path)
    head = read_header(source)
    _check_page_nbytes(source, head)
    try:
        with safe_open(source, framework="pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, MemoryError, RuntimeError, ValueError) as error:
        raise CacheFileError(f"{source}: not a cache that can be restored: {error}") from error
    return SavedCache(head.spec, Snapshot(tensors, head.numbers), head.about)


def read_header(path: str | os.PathLike[str]) -> CacheFileHeader:
    """What a file says, once its checksum was verified; neither rows nor pages are loaded."""
    source = Path(path)
    entries = _read_verified_metadata(source)
    try:
        about = entries.get("about", {})
        if not isinstance(about, dict):
            raise ValueError("what is said about it is no object")
        spec = from_json(json.dumps(entries["spec"]))
        stored, numbers = _read_tensor_index(source), _check_integers(entries["numbers"])
        return CacheFileHeader(
            spec, numbers, about, stored, _read_padded_lengths(source, stored, numbers)
        )
    except (CacheError, SafetensorError, KeyError, RuntimeError, ValueError) as error:
        raise CacheFileError(f"{source}: not a cache that can be restored: {error}") from error


def _read_tensor_index(path: Path) -> dict[str, FileTensor]:
    """How each tensor lies in the file; safetensors has checked that these numbers agree."""
    with safe_open(path, framework="pt"), path.open("rb") as file:
        entries = _parse_json(_read_header_bytes(path, file))
    del entries["__metadata__"]
    stored = {}
    for name, told in entries.items():
        first, stop = told["data_offsets"]
        if max(told["shape"], default=0) > MAX_INTEGER:  # of no bytes: another dimension is 0
            raise ValueError(f"{name} is {told['shape']}: {MAX_INTEGER} at most")
        stored[name] = FileTensor(told["dtype"], tuple(told["shape"]), stop - first)
    return stored


def _get_tables_per_sequence(numbers: Mapping[str, int], name: str) -> int:
    """Tables of a sequence, in the layer of a tensor; whether it is so, `restore` finds."""
    return max(1, numbers.get(f"{name.rpartition('/')[0]}/{TABLES_KEY}", 1))


def _read_padded_lengths(
    path: Path, tensors: Mapping[str, FileTensor], header_numbers: Mapping[str, int]
) -> tuple[int, ...]:
    """How far the first layer is whose integers are some; whether they agree, `restore` finds."""
    for name, told in tensors.items():
        whole = told.dtype == "I64" and len(told.shape) == 2 and told.shape[1] > PADDING
        if whole and name.rpartition("/")[2] == NUMBERS_KEY:
            with safe_open(path, framework="pt") as file:
                numbers = file.get_tensor(name)
            ends = (numbers[:, LENGTH] + numbers[:, PADDING]).tolist()
            return tuple(ends[:: _get_tables_per_sequence(header_numbers, name)])
    return ()


def _check_page_nbytes(path: Path, header: CacheFileHeader) -> None:
    """Refuse pages far larger than their rows: the last one of each sequence may hold a single one.

    Whether shapes agree, `restore` finds.
    """
    held = room = page = 0
    for name, recipe in iterate_leaves(header.spec):
        if not isinstance(recipe, LayerSpec):
            continue
        batch = header.tensors.get(f"{name}/{NUMBERS_KEY}")
        for side in recipe.sides:
            rows = header.tensors.get(f"{name}/{side}.open")
            if batch and rows and rows.nbytes:
                page, held = max(page, recipe.page), held + rows.nbytes
                begun = min(rows.shape[:1] + batch.shape[:1])
                room += begun * recipe.page * (rows.nbytes // max(rows.shape[:1], default=1))
    limit = max(MAX_OPEN_PAGE_BYTES, MAX_OPEN_PAGE_FACTOR * held)
    if room > limit:
        raise CacheFileError(
            f"{path}: page={page}: its pages take {room} bytes for rows of {held}, {limit} at "
            "most: save the cache with a smaller page"
        )


def _write_file(tensors: dict[str, torch.Tensor], path: Path, header: dict[str, Any]) -> None:
    path.touch(exist_ok=False)
    mode = path.stat().st_mode  # the writer replaces the file by one that only its owner may read
    try:
        save_file(tensors, path, metadata={METADATA_KEY: json.dumps(header)})
        path.chmod(mode)
    except SafetensorError as error:  # its message alone has the number of the error
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise OSError(f"not written: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    with path.open("r+b") as file:
        raw = _read_header_bytes(path, file)
        at = raw.index(CHECKSUM_MARK) + len(CHECKSUM_MARK)
        file.seek(0)
        digest = _compute_checksum(file, 8 + at)
        file.seek(8 + at)
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())


def _read_verified_metadata(path: Path) -> dict[str, Any]:
    """The header's own entries, if the whole file is what was written."""
    with path.open("rb") as file:
        raw = _read_header_bytes(path, file)
        header = _parse_metadata(path, raw)
        at = raw.find(CHECKSUM_MARK) + len(CHECKSUM_MARK)
        stored = raw[at : at + len(BLANK_CHECKSUM)].decode("ascii", "replace")
        file.seek(0)
        if header.get("checksum") != stored or _compute_checksum(file, 8 + at) != stored:
            raise CacheFileError(f"{path}: damaged: its checksum does not match its content")
    return header


def _read_header_bytes(path: Path, file: Any) -> bytes:
    size = int.from_bytes(file.read(8), "little")
    raw: bytes = file.read(size) if size <= MAX_HEADER_BYTES else b""
    if len(raw) != size or not raw.startswith(b"{"):
        raise CacheFileError(f"{path}: not a kvant cache, or cut short in its header")
    return raw


def _parse_metadata(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = _parse_json(_parse_json(raw)["__metadata__"][METADATA_KEY])
    except (KeyError, TypeError) as error:
        raise CacheFileError(
            f"{path}: not a kvant cache: no {METADATA_KEY!r} in its header"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CacheFileError(
            f"{path}: not a kvant cache: its header is no JSON: {error}"
        ) from error
    if not isinstance(header, dict) or header.get("version") != FORMAT_VERSION:
        version = header.get("version") if isinstance(header, dict) else None
        raise CacheFileError(
            f"{path}: version {version!r} of the format, {FORMAT_VERSION} is needed: such a file "
            "is not "
            "converted, so read its tokens again and save that cache"
        )
    return header


def _parse_json(text: str | bytes) -> Any:
    """JSON whose keys differ: of two that do not, readers would each believe another one."""
    return json.loads(text, object_pairs_hook=reject_duplicate_keys)


def _compute_checksum(file: Any, checksum_offset: int) -> str:
    """SHA-256 of a file whose checksum, at `at`, counts as blank."""
    sha = hashlib.sha256()
    place = 0
    while chunk := file.read(READ_CHUNK_BYTES):
        low, high = (
            max(checksum_offset - place, 0),
            min(checksum_offset + len(BLANK_CHECKSUM) - place, len(chunk)),
        )
        if low < high:
            chunk = chunk[:low] + BLANK_CHECKSUM[: high - low].encode() + chunk[high:]
        sha.update(chunk)
        place += len(chunk)
    return sha.hexdigest()


def _check_integers(numbers: Any) -> dict[str, int]:
    if not isinstance(numbers, dict) or any(type(n) is not int for n in numbers.values()):
        raise ValueError("numbers that are not integers")
    if not all(0 <= n <= MAX_INTEGER for n in numbers.values()):
        raise ValueError(f"numbers outside 0 to {MAX_INTEGER}")
    return numbers
