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
from kvant.progress import Bar
from kvant.sizes import format_size, parse_size
from kvant.tables import blank

if TYPE_CHECKING:
    from kvant.stores import Entry, Folder

DAY = 86_400.0
LOOKED_INTO = 8  # blobs of a namespace, until one says of which model it is

Place = Annotated[str, Argument(metavar="FOLDER", help="A folder that is a store.")]

store = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@store.callback()
def about_store() -> None:
    """Look into a folder of prefixes, check it, and delete from it."""


@store.command("ls")
def listed(
    folder: Place,
    pages: Annotated[bool, Option("--pages", help="Every blob.")] = False,
    json: options.Json = False,
) -> None:
    """One line a namespace: its model, its format, and what there is of it."""
    found = _store(folder)
    entries = sorted(found)
    told: dict[str, Any] = {"store": found.url}
    told["namespaces"] = [_space(found, *one) for one in _spaces(entries)]
    if pages:
        told["blobs"] = [_blob(entry) for entry in entries]
    if json:
        print(json_text.dumps(told))
        return
    console, _ = blank()
    for rows in [told["namespaces"], *([told["blobs"]] if pages else [])]:
        _, table = blank()
        for name in rows[0] if rows else ():
            right = name in ("pages", "anchors", "nbytes")
            table.add_column(_head(name), justify="right" if right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(_cell(name, value) for name, value in row.items()))
        console.print(table if rows else f"{found.url}: nothing is kept")


@store.command()
def stats(folder: Place, json: options.Json = False) -> None:
    """Everything together."""
    found = _store(folder)
    entries = list(found)
    times = [entry.used for entry in entries]
    told = {
        "store": found.url,
        "namespaces": len(_spaces(entries)),
        **_counts(entries),
        "blobs": len(entries),
        "first_used": _time(min(times)) if times else None,
        "last_used": _time(max(times)) if times else None,
        "nbytes_free": shutil.disk_usage(found.path).free,
    }
    _tell(told, json=json)


@store.command()
def verify(
    folder: Place,
    drop: Annotated[bool, Option("--drop", help="Delete what is damaged.")] = False,
    secret_file: Annotated[
        Path | None, Option(help="The secret that the blobs were written with.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Read every blob, and say which are damaged; exit code 1 if any is left."""
    found, secret = _store(folder), _secret(secret_file)
    entries = sorted(found)
    damaged: dict[Entry, str] = {}
    with Bar("reading", quiet=json) as bar:
        for done, entry in enumerate(entries, 1):
            if (why := _wrong(found, entry, secret)) is not None:
                damaged[entry] = why
            bar.show(done, len(entries))
    if drop and len(damaged) == len(entries) > 0:
        raise StoreError(
            f"{found.url}: none of {len(entries)} blobs is right, so nothing was deleted: were they"
            " written with another secret? --secret-file tells it"
        )
    for entry in damaged if drop else ():
        found.drop(entry.page, entry.part)
    if json:
        wrong = [{"page": one.page, "part": one.part, "why": why} for one, why in damaged.items()]
        told = {"store": found.url, "blobs": len(entries), "nbytes": _sum(entries)}
        print(json_text.dumps(told | {"damaged": wrong, "dropped": len(wrong) if drop else 0}))
    else:
        console, _ = blank()
        for entry, why in damaged.items():
            console.print(f"{entry.page} {entry.part}: {why}", soft_wrap=True)
        ends = f", {len(damaged)} damaged" if damaged else ": all are right"
        ends += ", which were deleted" if damaged and drop else ""
        console.print(f"{_amount(entries)}{ends}", soft_wrap=True)
    if damaged and not drop:
        raise Exit(1)


@store.command()
def prune(
    folder: Place,
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
    from kvant.stores import surplus

    found = _store(folder)
    spaces = _spaces(sorted(found))
    if namespace is not None:
        spaces = [one for one in spaces if one[0] == namespace]
        if not spaces:
            raise StoreError(f"{found.url}: there is no namespace {namespace!r}")
    entries = [entry for _, those in spaces for entry in those]
    if older_than is None and most is None:
        gone = entries
    else:
        since = None if older_than is None else time.time() - older_than * DAY
        gone = [entry for entry in entries if since is not None and entry.used < since]
        old = set(gone)
        left = [entry for entry in entries if entry not in old]
        gone += [] if most is None else surplus(left, most)
    with Bar("deleting", quiet=json) as bar:
        for done, entry in enumerate(gone, 1):
            found.drop(entry.page, entry.part)
            bar.show(done, len(gone))
    unfinished = found.tidy()
    if json:
        told = {"store": found.url, "blobs": len(gone), "nbytes": _sum(gone)}
        told |= {"unfinished": unfinished, "nbytes_left": _sum(entries) - _sum(gone)}
        print(json_text.dumps(told))
        return
    console, _ = blank()
    told_of = "" if namespace is None else f" of {namespace}"
    rest = format_size(_sum(entries) - _sum(gone))
    console.print(f"deleted: {_amount(gone)}{told_of}; {rest} left", soft_wrap=True)
    if unfinished:
        console.print(f"deleted: {unfinished} that killed writers left unfinished")


def _store(folder: str) -> Folder:
    """The store in a folder; nothing is made here."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        kind = "a folder is needed" if "://" in folder or path.exists() else "no such folder"
        raise StoreError(f"{folder.rpartition('@')[2]}: {kind}")
    within = (two for space in path.iterdir() if space.is_dir() for two in space.iterdir())
    if any(path.iterdir()) and not any(_two_digits(one.name) for one in within):
        raise StoreError(f"{path}: this folder is no store of kvant")
    from kvant.stores import Folder

    return Folder(path)


def _two_digits(name: str) -> bool:
    return len(name) == 2 and set(name) <= set("0123456789abcdef")


def _secret(file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--secret-file {file} cannot be read: {error.strerror}") from error
    if not secret:
        raise ValueError(f"--secret-file {file} is empty")
    return secret


def _wrong(found: Folder, entry: Entry, secret: bytes | None) -> str | None:
    """What is wrong with a blob; None too where it went meanwhile."""
    from kvant.stores import opened_as

    try:
        data = found.read(entry.page, entry.part)
        if data is not None:
            opened_as(entry.page, entry.part, data, secret)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (BlobError, StoreError) as error:
        return _plain(str(error))
    return None


def _spaces(entries: Iterable[Entry]) -> list[tuple[str, list[Entry]]]:
    """The namespaces, and the blobs of each."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.page.partition("/")[0], []).append(entry)
    return list(found.items())


def _space(found: Folder, name: str, entries: Sequence[Entry]) -> dict[str, Any]:
    from kvant.stores import about

    told: Mapping[str, str] = {}
    for entry in islice(entries, LOOKED_INTO):
        with suppress(BlobError, OSError):  # `verify` says why
            data = found.read(entry.page, entry.part)
            if data is not None and (told := about(data)):
                break
    return {
        "namespace": name,
        **{word: _plain(told[word]) if word in told else None for word in ("model", "spec")},
        **_counts(entries),
        "last_used": _time(max(entry.used for entry in entries)),
    }


def _counts(entries: Sequence[Entry]) -> dict[str, int]:
    anchors = [entry for entry in entries if entry.part.startswith("a-")]
    pages = {entry.page for entry in entries if not entry.part.startswith("a-")}
    return {"pages": len(pages), "anchors": len(anchors), "nbytes": _sum(entries)}


def _blob(entry: Entry) -> dict[str, Any]:
    told = {"page": entry.page, "part": entry.part, "nbytes": entry.nbytes}
    return {**told, "last_used": _time(entry.used)}


def _sum(entries: Iterable[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _amount(entries: Sequence[Entry]) -> str:
    return (
        f"{len(entries)} {'blob' if len(entries) == 1 else 'blobs'}, {format_size(_sum(entries))}"
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _plain(text: str) -> str:
    """What somebody wrote into a blob, as a terminal may see it."""
    return "".join(one if one.isprintable() else "?" for one in text)[:1000]


def _head(name: str) -> str:
    return {"nbytes": "bytes", "last_used": "last use"}.get(name, name)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "not told"
    return format_size(value) if name == "nbytes" else str(value)


def _tell(told: Mapping[str, Any], *, json: bool) -> None:
    if json:
        print(json_text.dumps(told))
        return
    console, _ = blank()
    for name, value in told.items():
        said = format_size(value) if name.startswith("nbytes") and value is not None else value
        console.print(f"{name}: {'never' if said is None else said}", soft_wrap=True)
