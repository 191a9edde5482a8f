"""`kvant store`: list, verify and prune a folder of stored prefixes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby, islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Exit, Option

from kvant.cli import options, print_json, print_line, print_table
from kvant.errors import BlobError, StoreError
from kvant.platform.paths import expand_path
from kvant.platform.sizes import format_count, format_size, parse_size
from kvant.platform.terminal import ProgressBar, make_printable

if TYPE_CHECKING:
    from kvant.stores import BlobInfo, FolderStore

DAY_SECONDS = 86_400.0
MAX_BLOBS_TRIED = 8  # per namespace, until one has readable metadata

# A heading that begins with > is aligned to the right.
HEADINGS = {"nbytes": ">bytes", "pages": ">pages", "anchors": ">anchors", "last_used": "last use"}

FolderArgument = Annotated[str, Argument(metavar="FOLDER", help="Folder of a store.")]

store = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, verify and prune a folder of stored prefixes.",
)


@store.command("ls")
def list_namespaces(
    folder: FolderArgument,
    pages: Annotated[bool, Option("--pages", help="List every blob, too.")] = False,
    json: options.Json = False,
) -> None:
    """List the namespaces of a store, with model, format and size."""
    folder_store = _open_folder(folder)
    entries = sorted(folder_store)
    report: dict[str, Any] = {"store": folder_store.url}
    report["namespaces"] = [
        _describe_namespace(folder_store, namespace, blobs)
        for namespace, blobs in _group_by_namespace(entries).items()
    ]
    if pages:
        report["blobs"] = [
            entry._asdict() | {"last_used": _format_time(entry.last_used)} for entry in entries
        ]
    if json:
        print_json(report)
        return
    if not entries:
        print_line(f"{folder_store.url}: the store is empty")
        return
    for rows in [report["namespaces"], *([report["blobs"]] if pages else [])]:
        names = [n for n in rows[0] if n != "extensions" or any(row[n] for row in rows)]
        print_table(
            [HEADINGS.get(name, name) for name in names],
            [[_format_cell(name, row[name]) for name in names] for row in rows],
        )


@store.command()
def stats(folder: FolderArgument, json: options.Json = False) -> None:
    """Show the totals of a store."""
    folder_store = _open_folder(folder)
    entries = sorted(folder_store)
    times = [entry.last_used for entry in entries]
    report: dict[str, Any] = {
        "store": folder_store.url,
        "namespaces": len(_group_by_namespace(entries)),
        **_count_entries(entries),
        "blobs": len(entries),
        "first_used": _format_time(min(times)) if times else None,
        "last_used": _format_time(max(times)) if times else None,
        "nbytes_free": shutil.disk_usage(folder_store.path).free,
    }
    if json:
        print_json(report)
        return
    for name, value in report.items():
        cell = format_size(value) if name.startswith("nbytes") else value
        print_line(f"{name}: {'never' if cell is None else cell}")


@store.command()
def verify(
    folder: FolderArgument,
    drop: Annotated[bool, Option("--drop", help="Delete corrupt blobs.")] = False,
    secret_file: Annotated[
        Path | None, Option(help="File with the secret that signed the blobs.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Check every blob and list the corrupt ones; exit code 1 if any remains."""
    folder_store, secret = _open_folder(folder), _read_secret(secret_file)
    entries = sorted(folder_store)
    corrupt: dict[BlobInfo, str] = {}
    with ProgressBar("reading", quiet=json) as bar:
        for done, entry in enumerate(entries, 1):
            if (reason := _find_damage(folder_store, entry, secret)) is not None:
                corrupt[entry] = reason
            bar.update(done, len(entries))
    if drop and len(corrupt) == len(entries) > 0:
        raise StoreError(
            f"{folder_store.url}: all {len(entries)} blobs fail verification, so none was deleted: "
            "if they were written with another secret, give --secret-file"
        )
    for entry in corrupt if drop else ():
        folder_store.drop(entry.page, entry.part)
    if json:
        damaged = [
            {"page": entry.page, "part": entry.part, "why": reason}
            for entry, reason in corrupt.items()
        ]
        report = {"store": folder_store.url, "blobs": len(entries), "nbytes": _sum_nbytes(entries)}
        report |= {"damaged": damaged, "dropped": len(damaged) if drop else 0}
        print_json(report)
    else:
        for entry, reason in corrupt.items():
            print_line(f"{entry.page} {entry.part}: {reason}")
        result = f", {len(corrupt)} corrupt" if corrupt else ": all intact"
        result += ", now deleted" if corrupt and drop else ""
        print_line(f"{_format_amount(entries)}{result}")
    if corrupt and not drop:
        raise Exit(1)


@store.command()
def prune(
    folder: FolderArgument,
    max_bytes: Annotated[
        str | None, Option(help="Evict the least recently used blobs until this is left: 20GiB.")
    ] = None,
    older_than: Annotated[
        float | None, Option(min=0.0, help="Delete blobs not used for this number of days.")
    ] = None,
    namespace: Annotated[
        str | None, Option(help="Restrict to this namespace; without a limit, delete all of it.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Delete old blobs, blobs over a limit, or a namespace."""
    if max_bytes is None and older_than is None and namespace is None:
        raise ValueError("nothing to delete: give --max-bytes, --older-than or --namespace")
    limit = None if max_bytes is None else parse_size(max_bytes)
    from kvant.stores import choose_evictions

    folder_store = _open_folder(folder)
    entries = sorted(folder_store)
    if namespace is not None:
        entries = _group_by_namespace(entries).get(namespace, [])
        if not entries:
            raise StoreError(f"{folder_store.url}: there is no namespace {namespace!r}")
    if older_than is None and limit is None:
        evicted = entries
    else:
        since = -inf if older_than is None else time.time() - older_than * DAY_SECONDS
        evicted = [entry for entry in entries if entry.last_used < since]
        remaining = [entry for entry in entries if entry.last_used >= since]
        evicted += [] if limit is None else choose_evictions(remaining, limit)
    with ProgressBar("deleting", quiet=json) as bar:
        for done, entry in enumerate(evicted, 1):
            folder_store.drop(entry.page, entry.part)
            bar.update(done, len(evicted))
    num_unfinished = folder_store.delete_unfinished()
    evicted_nbytes = _sum_nbytes(evicted)
    nbytes_left = _sum_nbytes(entries) - evicted_nbytes
    if json:
        report = {"store": folder_store.url, "blobs": len(evicted), "nbytes": evicted_nbytes}
        report |= {"unfinished": num_unfinished, "nbytes_left": nbytes_left}
        print_json(report)
        return
    scope = "" if namespace is None else f" of {namespace}"
    print_line(f"deleted: {_format_amount(evicted)}{scope}; {format_size(nbytes_left)} left")
    if num_unfinished:
        print_line(f"deleted: {num_unfinished} unfinished files of killed writers")


def _open_folder(folder: str) -> FolderStore:
    """Open the store in an existing folder; raise an error for any other folder.

    A store has the folders NAMESPACE/XX, where XX are two hexadecimal digits.
    """
    path = expand_path(folder)
    if not path.is_dir():
        problem = "a folder is needed" if "://" in folder or path.exists() else "no such folder"
        raise StoreError(f"{folder.rpartition('@')[2]}: {problem}")  # without a URL's password
    if any(path.iterdir()) and not any(path.glob("*/[0-9a-f][0-9a-f]")):
        raise StoreError(f"{path}: this folder is not a kvant store: give the folder of --store")
    from kvant.stores import FolderStore

    return FolderStore(path)


def _read_secret(file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--secret-file {file} cannot be read: {error.strerror}") from error
    if not secret:
        raise ValueError(f"--secret-file {file} is empty")
    return secret


def _find_damage(folder_store: FolderStore, entry: BlobInfo, secret: bytes | None) -> str | None:
    """Return what is wrong with a blob; None if it is intact or was evicted meanwhile."""
    from kvant.stores import parse_named_blob

    try:
        data = folder_store.read(entry.page, entry.part)
        if data is not None:
            parse_named_blob(entry.page, entry.part, data, secret)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (BlobError, StoreError) as error:
        return make_printable(str(error))
    return None


def _group_by_namespace(entries: Iterable[BlobInfo]) -> dict[str, list[BlobInfo]]:
    """Group sorted blobs by namespace."""
    groups = groupby(entries, lambda entry: entry.page.partition("/")[0])
    return {namespace: list(blobs) for namespace, blobs in groups}


def _describe_namespace(
    folder_store: FolderStore, name: str, entries: Sequence[BlobInfo]
) -> dict[str, Any]:
    from kvant.stores import read_metadata

    metadata: Mapping[str, str] = {}
    for entry in islice(entries, MAX_BLOBS_TRIED):
        with suppress(BlobError, OSError):  # corrupt blobs are for `verify`
            data = folder_store.read(entry.page, entry.part)
            if data is not None and (metadata := read_metadata(data)):
                break
    return {
        "namespace": name,
        **{key: _shorten(metadata.get(key)) for key in ("model", "spec", "extensions")},
        **_count_entries(entries),
        "last_used": _format_time(max(entry.last_used for entry in entries)),
    }


def _shorten(text: str | None) -> str | None:
    return None if text is None else make_printable(text)[:1000]


def _count_entries(entries: Sequence[BlobInfo]) -> dict[str, int]:
    """Count pages, anchors and bytes; an anchor is a tail state, whose part is named a-*."""
    anchors = [entry for entry in entries if entry.part.startswith("a-")]
    pages = {entry.page for entry in entries if not entry.part.startswith("a-")}
    return {"pages": len(pages), "anchors": len(anchors), "nbytes": _sum_nbytes(entries)}


def _sum_nbytes(entries: Iterable[BlobInfo]) -> int:
    return sum(entry.nbytes for entry in entries)


def _format_amount(entries: Sequence[BlobInfo]) -> str:
    return f"{format_count(len(entries), 'blob')}, {format_size(_sum_nbytes(entries))}"


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _format_cell(name: str, value: Any) -> str:
    if value is None:
        return "unknown"
    return format_size(value) if name == "nbytes" else str(value)
