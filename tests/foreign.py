"""Extensions that tests register, and packages that list some, made in a folder."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvant.platform.extensions import ExtensionTable
from kvant.spec.tables import TABLES
from kvant.stores.open import STORE_TABLE
from kvant.types import Bytes, Codec, Field, Fields, Frame, Identity, Score, ScoreInput

ALL_TABLES: tuple[ExtensionTable, ...] = (*TABLES.values(), STORE_TABLE)


@dataclass(frozen=True)
class RowSteps(Codec):
    """127 steps of the largest value of each row, so that constant rows are exact."""

    frame: ClassVar[Frame] = Identity()

    def fields(self, dim: int) -> Mapping[str, Field]:
        return {"steps": Field(torch.int8, dim), "top": Field(torch.float32, 1)}

    def seal(self, rows: Tensor) -> Fields:
        rows = rows.detach().float()
        top = rows.abs().amax(-1, keepdim=True)
        steps = (rows / top.where(top > 0, 1.0) * 127).round()
        return {"steps": steps.nan_to_num(0).to(torch.int8), "top": top}

    def open(self, fields: Fields) -> Tensor:
        return fields["steps"].float() / 127 * fields["top"]


@dataclass(frozen=True)
class LongKeys(Score):
    """Score keys by their length."""

    name: ClassVar[str] = "longkeys"

    def score_rows(self, rows: ScoreInput) -> Tensor:
        return rows.keys.norm(dim=-1)


class MemoryStore:
    """Blobs in a dictionary."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.blobs: dict[tuple[str, str], Bytes] = {}

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        return [frozenset(part for at, part in self.blobs if at == page) for page in pages]

    def get(self, page: str, part: str) -> Bytes | None:
        return self.blobs.get((page, part))

    def put(self, page: str, part: str, blob: Bytes) -> None:
        self.blobs.setdefault((page, part), blob)

    def drop(self, page: str, part: str) -> None:
        self.blobs.pop((page, part), None)


PACKAGE_SOURCE = """
from foreign import LongKeys, MemoryStore, RowSteps
from dataclasses import dataclass

@dataclass(frozen=True)
class Steps(RowSteps):
    "Steps of each row."

@dataclass(frozen=True)
class Keys(LongKeys):
    name = "keys"

class Store(MemoryStore):
    pass

NUMBER = 3
"""


ENTRIES = {"codecs:steps": "Steps", "scores:keys": "Keys", "stores:pile": "Store"}


def forget_entry_points() -> None:
    """Make the tables read the entry points of installed packages again."""
    for table in ALL_TABLES:
        for name in ("_entry_points", "_valid_entries"):
            vars(table).pop(name, None)


def uninstall_packages(folder: Path) -> None:
    """Undo `install_package`, and what was registered."""
    for info in folder.rglob("*.dist-info"):
        shutil.rmtree(info)
    for table in ALL_TABLES:
        table._added.clear()
    forget_entry_points()


def install_package(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    entries: Mapping[str, str] = ENTRIES,
    *,
    name: str = "kvant-steps",
    version: str = "1.2",
    source: str = PACKAGE_SOURCE,
) -> str:
    """Install a package into `folder`; return its module, which is not imported yet.

    `entries` maps "codecs:name" to an object of the module.
    """
    module = name.replace("-", "_")
    folder = folder / f"site-{name}"
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for entry, value in entries.items():
        kind, _, word = entry.partition(":")
        lines += [f"[kvant.{kind}]", f"{word} = {module}:{value}"]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
    forget_entry_points()
    return module
