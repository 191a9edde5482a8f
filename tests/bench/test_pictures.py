"""Test that one command draws all plots of docs/ from the stored results."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
ELSEWHERE = {"quality.png"}  # tools/quality_page.py
TOOL = runpy.run_path(str(ROOT / "tools" / "pictures.py"))


def test_plots_in_the_docs_match_their_data() -> None:
    documented = {
        (page.parent / name).relative_to(DOCS).as_posix()
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"!\[[^]]*\]\((.+?\.png)\)", page.read_text(encoding="utf-8"))
    }
    assert documented - ELSEWHERE == set(TOOL["PICTURES"])
    assert all((DOCS / name).exists() for name in documented)


def test_series_has_a_figure_for_each_client_count() -> None:
    rows = [
        {"way": way, "clients": clients, "tokens_s": clients * each}
        for clients in (1, 4)
        for way, each in (("engine", 10.0), ("server", 9.0))
    ]
    assert TOOL["group_by_clients"](rows, "way") == {
        "engine": {"1 client": 10.0, "4 clients": 40.0},
        "server": {"1 client": 9.0, "4 clients": 36.0},
    }


@pytest.mark.parametrize("name", TOOL["PICTURES"])
def test_plot_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only pictures need it")
    file = tmp_path / "a.png"
    TOOL["PICTURES"][name](file)
    assert file.read_bytes()[:4] == b"\x89PNG"
