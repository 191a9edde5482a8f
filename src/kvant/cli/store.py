"""`kvant store`: what lies in a folder of prefixes; is it right; what may go."""

from __future__ import annotations

import json as json_text
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Exit, Option

from kvant.cli import options
from kvant.errors import BlobError, StoreError
from kvant.progress import ProgressBar
from kvant.sizes import format_count, format_size, parse_size
from kvant.tables import make_table

if TYPE_CHECKING:
    from kvant.stores import BlobInfo, FolderStore

DAY_SECONDS = 86_400.0
MAX_BLOBS_TRIED = 8  # blobs of a namespace, until one says of which model it is

FolderArgument = Annotated[str, Argument(metavar="FOLDER", help="A folder that is a store.")]

store = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@store.callback()
def store_callback() -> None:
    """Look into a folder of prefixes, check it, and delete from it."""


@store.command("ls")
def list_namespaces(
    folder: FolderArgument,
    pages: Annotated[bool, Option("--pages", help="Every blob.")] = False,
    json: options.Json = False,
) -> None:
    """One line a namespace: its model, its format, and what there is of it."""
    found = _open_folder(folder)
    entries = sorted(found)
    told: dict[str, Any] = {"store": found.url}
    told["namespaces"] = [_describe_namespace(found, *one) for one in _group_by_namespace(entries)]
    if pages:
        told["blobs"] = [_describe_blob(entry) for entry in entries]
    if json:
        print(json_text.dumps(told))
        return
    console, _ = make_table()
    for rows in [told["namespaces"], *([told["blobs"]] if pages else [])]:
        _, table = make_table()
        for name in rows[0] if rows else ():
            right = name in ("pages", "anchors", "nbytes")
            table.add_column(
                _format_heading(name), justify="right" if right else "left", no_wrap=True
            )
        for row in rows:
            table.add_row(*(_format_cell(name, value) for name, value in row.items()))
        console.print(table if rows else f"{found.url}: nothing is kept")


@store.command()
def stats(folder: FolderArgument, json: options.Json = False) -> None:
    """Everything together."""
    found = _open_folder(folder)
    entries = list(found)
    times = [entry.last_used for entry in entries]
    told = {
        "store": found.url,
        "namespaces": len(_group_by_namespace(entries)),
        **_count_entries(entries),
        "blobs": len(entries),
        "first_used": _format_time(min(times)) if times else None,
        "last_used": _format_time(max(times)) if times else None,
        "nbytes_free": shutil.disk_usage(found.path).free,
    }
    _print_report(told, json=json)


@store.command()
def verify(
    folder: FolderArgument,
    drop: Annotated[bool, Option("--drop", help="Delete what is damaged.")] = False,
    secret_file: Annotated[
        Path | None, Option(help="The secret that the blobs were written with.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Read every blob, and say which are damaged; exit code 1 if any is left."""
    found, secret = _open_folder(folder), _read_secret(secret_file)
    entries = sorted(found)
    damaged: dict[BlobInfo, str] = {}
    with ProgressBar("reading", quiet=json) as bar:
        for done, entry in enumerate(entries, 1):
            if (why := _find_damage(found, entry, secret)) is not None:
                damaged[entry] = why
            bar.update(done, len(entries))
    if drop and len(damaged) == len(entries) > 0:
        raise StoreError(
            f"{found.url}: none of {len(entries)} blobs is right, so nothing was deleted: were they"
            " written with another secret? --secret-file tells it"
        )
    for entry in damaged if drop else ():
        found.drop(entry.page, entry.part)
    if json:
        wrong = [{"page": one.page, "part": one.part, "why": why} for one, why in damaged.items()]
        told = {"store": found.url, "blobs": len(entries), "nbytes": _sum_nbytes(entries)}
        print(json_text.dumps(told | {"damaged": wrong, "dropped": len(wrong) if drop else 0}))
    else:
        console, _ = make_table()
        for entry, why in damaged.items():
            console.print(f"{entry.page} {entry.part}: {why}", soft_wrap=True)
        ends = f", {len(damaged)} damaged" if damaged else ": all are right"
        ends += ", which were deleted" if damaged and drop else ""
        console.print(f"{_format_amount(entries)}{ends}", soft_wrap=True)
    if damaged and not drop:
        raise Exit(1)


@store.command()
def prune(
    folder: FolderArgument,
    max_bytes: Annotated[
        str | None, Option(help="Leave so much, as 20GiB; what was not used for longest goes.")
    ] = None,
    older_than: Annotated[
        float | None, Option(min=0.0, help="Delete what was not used for so many days.")
    ] = None,
    namespace: Annotated[
        str | None, Option(help="Of this one only; alone, all of it is deleted.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Delete what is old, too much, or of one namespace."""
    if max_bytes is None and older_than is None and namespace is None:
        raise ValueError("what is to go? --max-bytes, --older-than or --namespace says it")
    most = None if max_bytes is None else parse_size(max_bytes)
    from kvant.stores import choose_evictions

    found = _open_folder(folder)
    spaces = _group_by_namespace(sorted(found))
    if namespace is not None:
        spaces = [one for one in spaces if one[0] == namespace]
        if not spaces:
            raise StoreError(f"{found.url}: there is no namespace {namespace!r}")
    entries = [entry for _, those in spaces for entry in those]
    if older_than is None and most is None:
        gone = entries
    else:
        since = None if older_than is None else time.time() - older_than * DAY_SECONDS
        gone = [entry for entry in entries if since is not None and entry.last_used < since]
        old = set(gone)
        left = [entry for entry in entries if entry not in old]
        gone += [] if most is None else choose_evictions(left, most)
    with ProgressBar("deleting", quiet=json) as bar:
        for done, entry in enumerate(gone, 1):
            found.drop(entry.page, entry.part)
            bar.update(done, len(gone))
    unfinished = found.delete_unfinished()
    if json:
        told = {"store": found.url, "blobs": len(gone), "nbytes": _sum_nbytes(gone)}
        told |= {"unfinished": unfinished, "nbytes_left": _sum_nbytes(entries) - _sum_nbytes(gone)}
        print(json_text.dumps(told))
        return
    console, _ = make_table()
    told_of = "" if namespace is None else f" of {namespace}"
    rest = format_size(_sum_nbytes(entries) - _sum_nbytes(gone))
    console.print(f"deleted: {_format_amount(gone)}{told_of}; {rest} left", soft_wrap=True)
    if unfinished:
        console.print(f"deleted: {unfinished} that killed writers left unfinished")


def _open_folder(folder: str) -> FolderStore:
    """The store in a folder; nothing is made here."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        kind = "a folder is needed" if "://" in folder or path.exists() else "no such folder"
        raise StoreError(f"{folder.rpartition('@')[2]}: {kind}")
    within = (two for space in path.iterdir() if space.is_dir() for two in space.iterdir())
    if any(path.iterdir()) and not any(_is_two_digits(one.name) for one in within):
        raise StoreError(f"{path}: this folder is no store of kvant")
    from kvant.stores import FolderStore

    return FolderStore(path)


def _is_two_digits(name: str) -> bool:
    return len(name) == 2 and set(name) <= set("0123456789abcdef")


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
    """What is wrong with a blob; None too where it went meanwhile."""
    from kvant.stores import parse_named_blob

    try:
        data = folder_store.read(entry.page, entry.part)
        if data is not None:
            parse_named_blob(entry.page, entry.part, data, secret)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (BlobError, StoreError) as error:
        return _make_printable(str(error))
    return None


def _group_by_namespace(entries: Iterable[BlobInfo]) -> list[tuple[str, list[BlobInfo]]]:
    """The namespaces, and the blobs of each."""
    found: dict[str, list[BlobInfo]] = {}
    for entry in entries:
        found.setdefault(entry.page.partition("/")[0], []).append(entry)
    return list(found.items())


def _describe_namespace(
    folder_store: FolderStore, name: str, entries: Sequence[BlobInfo]
) -> dict[str, Any]:
    from kvant.stores import read_metadata

    told: Mapping[str, str] = {}
    for entry in islice(entries, MAX_BLOBS_TRIED):
        with suppress(BlobError, OSError):  # `verify` says why
            data = folder_store.read(entry.page, entry.part)
            if data is not None and (told := read_metadata(data)):
                break
    return {
        "namespace": name,
        **{
            word: _make_printable(told[word]) if word in told else None
            for word in ("model", "spec")
        },
        **_count_entries(entries),
        "last_used": _format_time(max(entry.last_used for entry in entries)),
    }


def _count_entries(entries: Sequence[BlobInfo]) -> dict[str, int]:
    anchors = [entry for entry in entries if entry.part.startswith("a-")]
    pages = {entry.page for entry in entries if not entry.part.startswith("a-")}
    return {"pages": len(pages), "anchors": len(anchors), "nbytes": _sum_nbytes(entries)}


def _describe_blob(entry: BlobInfo) -> dict[str, Any]:
    told = {"page": entry.page, "part": entry.part, "nbytes": entry.nbytes}
    return {**told, "last_used": _format_time(entry.last_used)}


def _sum_nbytes(entries: Iterable[BlobInfo]) -> int:
    return sum(entry.nbytes for entry in entries)


def _format_amount(entries: Sequence[BlobInfo]) -> str:
    return f"{format_count(len(entries), 'blob')}, {format_size(_sum_nbytes(entries))}"


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _make_printable(text: str) -> str:
    """What somebody wrote into a blob, as a terminal may see it."""
    return "".join(one if one.isprintable() else "?" for one in text)[:1000]


def _format_heading(name: str) -> str:
    return {"nbytes": "bytes", "last_used": "last use"}.get(name, name)


def _format_cell(name: str, value: Any) -> str:
    if value is None:
        return "not told"
    return format_size(value) if name == "nbytes" else str(value)


def _print_report(report: Mapping[str, Any], *, json: bool) -> None:
    if json:
        print(json_text.dumps(report))
        return
    console, _ = make_table()
    for name, value in report.items():
        said = format_size(value) if name.startswith("nbytes") and value is not None else value
        console.print(f"{name}: {'never' if said is None else said}", soft_wrap=True)
