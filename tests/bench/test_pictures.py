"""Test that one command draws all pictures of docs/ from the stored results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pictures
from pages import DOCS
from pictures import PICTURES

ELSEWHERE = {"quality.png"}  # tools/quality_page.py


def test_pictures_in_the_docs_are_drawn() -> None:
    documented = {
        (page.parent / name).relative_to(DOCS).as_posix()
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"!\[[^]]*\]\((.+?\.(?:png|svg))\)", page.read_text("utf-8"))
    }
    assert documented - ELSEWHERE == set(PICTURES)
    assert all((DOCS / name).exists() for name in documented)


def test_series_has_a_figure_for_each_client_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"way": way, "clients": clients, "tokens_s": clients * each}
        for clients in (1, 4)
        for way, each in (("engine", 10.0), ("server", 9.0))
    ]
    drawn = []
    monkeypatch.setattr(pictures, "load_results", lambda name: {"rows": rows})
    monkeypatch.setattr(pictures, "draw_bars", lambda series, *_: drawn.append(series))
    pictures.draw_clients("serve.json", "way", Path("a.png"))
    assert drawn == [
        {
            "engine": {"1 client": 10.0, "4 clients": 40.0},
            "server": {"1 client": 9.0, "4 clients": 36.0},
        }
    ]


@pytest.mark.parametrize("name", [name for name in PICTURES if name.endswith(".png")])
def test_plot_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only pictures need it")
    file = tmp_path / "a.png"
    PICTURES[name](file)
    assert file.read_bytes()[:4] == b"\x89PNG"
