"""Cache files: safetensors of a snapshot, with the spec and a checksum in the header.

A file is written under a temporary name and renamed once it is complete. Foreign files, other
versions, and files with a changed byte are refused before any tensor is loaded. No pickle.
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
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvant.cache.cache import Cache
from kvant.cache.layout import iterate_leaves
from kvant.cache.snapshot import NUMBERS_KEY, TABLES_KEY
from kvant.contracts import Snapshot
from kvant.errors import CacheError, CacheFileError, name_path
from kvant.page_table import LENGTH, PADDING
from kvant.platform.extensions import Extension
from kvant.recipes import CacheSpec, LayerSpec
from kvant.spec import from_json, to_json
from kvant.spec.headers import reject_duplicate_keys
from kvant.spec.packages import (
    check_extensions_used,
    decode_extensions,
    encode_extensions,
    list_extensions,
)

# All metadata is one entry of JSON. Several entries could be written in any order, but equal caches
# should give equal files.
METADATA_KEY = "kvant-cache"
FORMAT_VERSION = 2
BLANK_CHECKSUM = "0" * 64  # in place of the checksum while it is computed
CHECKSUM_MARK = rb"\"checksum\": \""  # as escaped in JSON inside JSON
MAX_HEADER_BYTES = 100 << 20  # the limit of safetensors
MAX_INTEGER = 1 << 53  # exact in every JSON reader; no tensor is longer
# The restored open pages of a file may take MAX_OPEN_PAGE_BYTES, or MAX_OPEN_PAGE_FACTOR times the
# bytes of their rows in the file, whichever is more.
MAX_OPEN_PAGE_BYTES = 1 << 28
MAX_OPEN_PAGE_FACTOR = 1 << 12
READ_CHUNK_BYTES = 1 << 22
# What an invalid file, or one too large for the memory, may raise.
RESTORE_ERRORS = CacheError, SafetensorError, KeyError, MemoryError, RuntimeError, ValueError


class Storable(Protocol):
    """A `Cache`, or an object that contains one and can be saved like it."""

    @property
    def spec(self) -> CacheSpec: ...
    def shared_snapshot(self) -> Snapshot: ...


class FileTensor(NamedTuple):
    """One tensor of a file, as its header describes it."""

    dtype: str  # as safetensors names it: F16, U8
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class CacheFileHeader:
    """The header of a file, readable without its tensors."""

    spec: CacheSpec
    numbers: Mapping[str, int]
    about: Mapping[str, Any]
    tensors: Mapping[str, FileTensor]
    padded_lengths: tuple[int, ...]  # tokens per sequence, padding included; (): no rows stored
    extensions: tuple[Extension, ...] = ()  # codecs and scores of the spec that are not kvant's
    version: int = FORMAT_VERSION

    def count_key_heads(self, name: str) -> int:
        """Return the number of key heads of the layer whose rows are in the tensor `name`.

        A layer with a page table per head stores the heads as separate sequences.
        """
        return self.tensors[name].shape[1] * _get_tables_per_sequence(self.numbers, name)


@dataclass(frozen=True)
class SavedCache:
    """The contents of a file: a cache, and the `about` that was passed to `save`."""

    spec: CacheSpec
    snapshot: Snapshot
    about: Mapping[str, Any] = field(default_factory=dict)


def save(
    cache: Storable,
    path: str | os.PathLike[str],
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a cache to a file; an older file of that name is replaced once the new one is complete.

    `about` is a JSON object that `read` returns. `kvant.load` also takes a model, and returns a
    cache for it.

    >>> cache = kvant.cache_for(model, "affine4")
    >>> ids = model.generate(**inputs, cache=cache, max_new_tokens=4)
    >>> kvant.save(cache, "chat.kv")
    >>> kvant.load("chat.kv", model).get_seq_length() == cache.get_seq_length()
    True
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: there is no folder {target.parent}")
    snapshot = cache.shared_snapshot()
    header = {
        "version": FORMAT_VERSION,
        "checksum": BLANK_CHECKSUM,
        "spec": json.loads(to_json(cache.spec)),
        "numbers": dict(snapshot.numbers),
    }
    if extensions := list_extensions(cache.spec):
        header["extensions"] = encode_extensions(extensions)
    if about:
        header["about"] = dict(about)
    tensors = {name: tensor.contiguous() for name, tensor in snapshot.tensors.items()}
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with name_path(target):
            _write_file(tensors, temporary, header)
            temporary.replace(target)
    finally:
        with suppress(OSError):  # a read-only disk refuses this as well
            temporary.unlink(missing_ok=True)


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
) -> Cache:
    """Return a new cache with the contents of a file, in pools of its own."""
    saved = read(path, device=device)
    with convert_errors(path):
        cache = Cache.from_spec(saved.spec)
        cache.restore(saved.snapshot)
    return cache


@contextmanager
def convert_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert RESTORE_ERRORS that the block raises to a CacheFileError that names the file."""
    try:
        yield
    except RESTORE_ERRORS as error:
        raise CacheFileError(f"{path}: not a cache that can be restored: {error}") from error


def read(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> SavedCache:
    """Return the contents of a file; a cache of the same spec can `restore` the snapshot."""
    source = Path(path)
    header = read_header(source)
    _check_page_nbytes(source, header)
    with convert_errors(source), safe_open(source, "pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return SavedCache(header.spec, Snapshot(tensors, header.numbers), header.about)


def read_header(path: str | os.PathLike[str]) -> CacheFileHeader:
    """Return the header of a file after verifying its checksum; loads no rows or pages."""
    source = Path(path)
    entries, metadata = _read_verified_header(source)
    extensions = decode_extensions(metadata.get("extensions", []), str(source))
    with convert_errors(source), safe_open(source, "pt") as file:  # validates the tensors
        about = metadata.get("about", {})
        if not isinstance(about, dict):
            raise ValueError("`about` is not a JSON object")
        spec = from_json(json.dumps(metadata["spec"]))
        check_extensions_used(extensions, spec)
        tensors, numbers = _index_tensors(entries), _check_integers(metadata["numbers"])
        lengths = _read_padded_lengths(file, tensors, numbers)
        return CacheFileHeader(spec, numbers, about, tensors, lengths, extensions)


def _index_tensors(entries: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Return dtype, shape and size of each tensor of a header; safetensors has validated them."""
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        first, stop = entry["data_offsets"]
        if max(entry["shape"], default=0) > MAX_INTEGER:  # allowed if another dimension is 0
            raise ValueError(f"{name} is {entry['shape']}: {MAX_INTEGER} at most")
        tensors[name] = FileTensor(entry["dtype"], tuple(entry["shape"]), stop - first)
    return tensors


def _get_tables_per_sequence(numbers: Mapping[str, int], name: str) -> int:
    """Return the number of page tables per sequence in the layer of a tensor.

    `restore` validates it.
    """
    return max(1, numbers.get(f"{name.rpartition('/')[0]}/{TABLES_KEY}", 1))


def _read_padded_lengths(
    file: Any, tensors: Mapping[str, FileTensor], header_numbers: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the padded lengths, from the first layer with a tensor of `PageTable.numbers`.

    `restore` verifies that the other layers agree.
    """
    for name, tensor in tensors.items():
        is_integer_matrix = (
            tensor.dtype == "I64" and len(tensor.shape) == 2 and tensor.shape[1] > PADDING
        )
        if is_integer_matrix and name.rpartition("/")[2] == NUMBERS_KEY:
            numbers = file.get_tensor(name)
            padded_lengths = (numbers[:, LENGTH] + numbers[:, PADDING]).tolist()
            return tuple(padded_lengths[:: _get_tables_per_sequence(header_numbers, name)])
    return ()


def _check_page_nbytes(path: Path, header: CacheFileHeader) -> None:
    """Refuse open pages that need far more memory than their rows take in the file.

    The limit is generous, because the last page of a sequence may hold a single row.
    `restore` validates the shapes.
    """
    row_nbytes = page_nbytes = page_size = 0
    for name, recipe in iterate_leaves(header.spec):
        if not isinstance(recipe, LayerSpec):
            continue
        table_numbers = header.tensors.get(f"{name}/{NUMBERS_KEY}")
        for side in recipe.sides:
            rows = header.tensors.get(f"{name}/{side}.open")
            if table_numbers and rows and rows.nbytes:
                page_size, row_nbytes = max(page_size, recipe.page), row_nbytes + rows.nbytes
                # Full pages are as large as their rows; each table has at most one partial page.
                num_pages = min(rows.shape[:1] + table_numbers.shape[:1], default=0)
                page_nbytes += (
                    num_pages * recipe.page * (rows.nbytes // max(rows.shape[:1], default=1))
                )
    limit = max(MAX_OPEN_PAGE_BYTES, MAX_OPEN_PAGE_FACTOR * row_nbytes)
    if page_nbytes > limit:
        raise CacheFileError(
            f"{path}: page={page_size}: open pages would take {page_nbytes} bytes for "
            f"{row_nbytes} bytes of rows, {limit} at most: save it with a smaller page"
        )


def _write_file(tensors: dict[str, torch.Tensor], path: Path, header: dict[str, Any]) -> None:
    path.touch(exist_ok=False)
    mode = path.stat().st_mode  # save_file makes the file private to its owner
    try:
        save_file(tensors, path, metadata={METADATA_KEY: json.dumps(header)})
        path.chmod(mode)
    except SafetensorError as error:  # only its message contains the errno
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise OSError(f"not written: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    with path.open("r+b") as file:
        header_bytes = _read_header_bytes(path, file)
        offset = header_bytes.index(CHECKSUM_MARK) + len(CHECKSUM_MARK)
        file.seek(0)
        digest = _compute_checksum(file, 8 + offset)
        file.seek(8 + offset)
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())


def _read_verified_header(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the safetensors header and the kvant metadata, after verifying the checksum."""
    with path.open("rb") as file:
        header_bytes = _read_header_bytes(path, file)
        header, metadata = _parse_header(path, header_bytes)
        offset = header_bytes.find(CHECKSUM_MARK) + len(CHECKSUM_MARK)
        stored = header_bytes[offset : offset + len(BLANK_CHECKSUM)].decode("ascii", "replace")
        file.seek(0)
        if metadata.get("checksum") != stored or _compute_checksum(file, 8 + offset) != stored:
            raise CacheFileError(f"{path}: corrupt: its checksum does not match its content")
    return header, metadata


def _read_header_bytes(path: Path, file: BinaryIO) -> bytes:
    size = int.from_bytes(file.read(8), "little")
    header_bytes: bytes = file.read(size) if size <= MAX_HEADER_BYTES else b""
    if len(header_bytes) != size or not header_bytes.startswith(b"{"):
        raise CacheFileError(f"{path}: not a kvant cache, or truncated in its header")
    return header_bytes


def _parse_header(path: Path, raw: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        header = _parse_json(raw)
        metadata = _parse_json(header["__metadata__"][METADATA_KEY])
    except (KeyError, TypeError) as error:
        raise CacheFileError(
            f"{path}: not a kvant cache: no {METADATA_KEY!r} in its header"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CacheFileError(
            f"{path}: not a kvant cache: its header is not JSON: {error}"
        ) from error
    version = metadata.get("version") if isinstance(metadata, dict) else None
    if version != FORMAT_VERSION:
        raise CacheFileError(
            f"{path}: version {version!r} of the format, {FORMAT_VERSION} is needed: there is no "
            "conversion, so process its tokens again and save the new cache"
        )
    return header, metadata


def _parse_json(text: str | bytes) -> Any:
    """Parse JSON and refuse duplicate keys, because readers differ in which one they use."""
    return json.loads(text, object_pairs_hook=reject_duplicate_keys)


def _compute_checksum(file: BinaryIO, checksum_offset: int) -> str:
    """Return the SHA-256 of a file with BLANK_CHECKSUM at `checksum_offset`."""
    sha = hashlib.sha256()
    position = 0
    while chunk := file.read(READ_CHUNK_BYTES):
        start = max(checksum_offset - position, 0)
        stop = min(checksum_offset + len(BLANK_CHECKSUM) - position, len(chunk))
        if start < stop:
            chunk = chunk[:start] + BLANK_CHECKSUM[: stop - start].encode() + chunk[stop:]
        sha.update(chunk)
        position += len(chunk)
    return sha.hexdigest()


def _check_integers(numbers: Any) -> dict[str, int]:
    if not isinstance(numbers, dict) or any(type(n) is not int for n in numbers.values()):
        raise ValueError("numbers that are not integers")
    if not all(0 <= n <= MAX_INTEGER for n in numbers.values()):
        raise ValueError(f"numbers outside 0 to {MAX_INTEGER}")
    return numbers
