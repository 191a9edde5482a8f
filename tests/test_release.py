"""Test the parts of tools/release.py and tools/package_metadata.py that build nothing."""

from __future__ import annotations

import datetime
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

import kvant
import package_metadata
import release
from release import StepError

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "https://github.com/someone/cache"
DATE = datetime.date(2026, 3, 1)
CHANGELOG = """# Changelog

## [Unreleased]

### Added

- A format.

## [0.1.0] - 2026-01-02

- The first version.
"""


def test_entries_of_unreleased_become_a_version() -> None:
    released = release.release_changelog(CHANGELOG, "0.2.0", DATE)
    heading = "## [Unreleased]\n\n## [0.2.0] - 2026-03-01\n"
    assert released == CHANGELOG.replace("## [Unreleased]\n", heading)
    assert release.has_heading(released, "0.2.0") and release.has_heading(released, "0.1.0")
    assert not release.has_heading(CHANGELOG, "0.2.0")


@pytest.mark.parametrize(
    ("changelog", "version", "message"),
    [
        (CHANGELOG, "0.1.0", "already has 0.1.0"),
        (CHANGELOG, "next", "'next' is not a version"),
        (CHANGELOG.replace("- A format.\n", ""), "0.2.0", "no entries"),
        ("# Changelog\n", "0.2.0", "no entries"),
    ],
)
def test_a_changelog_that_cannot_be_released(changelog: str, version: str, message: str) -> None:
    with pytest.raises(StepError, match=message):
        release.release_changelog(changelog, version, DATE)


def test_prepare_changes_two_files_and_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("CHANGELOG", CHANGELOG), ("VERSION_FILE", '__version__ = "0.1.0"\n')):
        copy = tmp_path / getattr(release, name).name
        copy.write_text(text)
        monkeypatch.setattr(release, name, copy)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    release.prepare("7.8.9rc1")
    assert release.read_version(release.VERSION_FILE.read_text()) == "7.8.9rc1"
    assert release.has_heading(release.CHANGELOG.read_text(), "7.8.9rc1")
    with pytest.raises(StepError, match="already has"):
        release.prepare("7.8.9rc1")


def test_version_is_in_one_place() -> None:
    source = release.VERSION_FILE.read_text()
    assert release.read_version(source) == kvant.__version__
    assert release.replace_version(source, "7.8.9").count("7.8.9") == 1
    assert "version" not in release.read_pyproject()["project"]
    with pytest.raises(StepError, match="no line"):
        release.read_version("")


def test_address_is_in_one_place() -> None:
    (address,) = (
        entry["address"]
        for entry in release.read_pyproject()["tool"]["dynamic-metadata"]
        if "address" in entry
    )
    owner, name = address.removeprefix("https://github.com/").split("/")
    pattern = f"{owner}/{name}|{owner}.github.io"
    listing = subprocess.run(
        ["git", "-C", ROOT, "grep", "-IEn", pattern], capture_output=True, text=True, check=False
    )
    if listing.returncode > 1:
        pytest.skip("not a git repository")
    assert len(listing.stdout.splitlines()) == 1, listing.stdout


def test_links_begin_with_the_address() -> None:
    urls = package_metadata.make_urls(ADDRESS)
    assert urls["Homepage"] == ADDRESS
    assert urls["Documentation"] == "https://someone.github.io/cache"
    page = "[a](docs/a.md) ![b](docs/b.png) [c](#start) [d](https://d.org)"
    assert package_metadata.make_links_absolute(page, ADDRESS) == (
        f"[a]({ADDRESS}/blob/main/docs/a.md) "
        "![b](https://raw.githubusercontent.com/someone/cache/main/docs/b.png) "
        "[c](#start) [d](https://d.org)"
    )


def test_readme_has_no_relative_links_on_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    fields = package_metadata.dynamic_metadata({"address": ADDRESS}, {})
    links = re.findall(r"\]\(([^)]+)\)", fields["readme"]["text"])
    assert links and all(link.startswith(("https://", "http://", "#")) for link in links)


def make_wheel(folder: Path, tags: str, machine: int, left_out: str = "") -> Path:
    path = folder / f"kvant-0.1.0-py3-none-{tags}.whl"
    elf = b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") + bytes(44)
    with zipfile.ZipFile(path, "w") as archive:
        for name in release.REQUIRED_FILES:
            if name != left_out:
                archive.writestr(name, elf if name == release.LIBRARY else b"")
    return path


@pytest.mark.parametrize("tags", ["linux_aarch64", "manylinux_2_27_aarch64.manylinux_2_28_aarch64"])
def test_a_right_wheel(tmp_path: Path, tags: str) -> None:
    release.check_wheel(make_wheel(tmp_path, tags, 183), "aarch64")


@pytest.mark.parametrize(
    ("tags", "machine", "left_out", "message"),
    [
        ("any", 183, "", "is not for aarch64: were the kernels compiled"),
        ("linux_x86_64", 183, "", "is not for aarch64"),
        ("linux_aarch64", 62, "", "libkvant.so in .* is not for aarch64"),
        ("linux_aarch64", 183, "kvant/py.typed", "lacks kvant/py.typed"),
    ],
)
def test_a_wrong_wheel(
    tmp_path: Path, tags: str, machine: int, left_out: str, message: str
) -> None:
    with pytest.raises(StepError, match=message):
        release.check_wheel(make_wheel(tmp_path, tags, machine, left_out), "aarch64")


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "find_one", lambda folder, pattern: tmp_path)
    monkeypatch.setattr(release.shutil, "unpack_archive", lambda *paths, **options: None)
    monkeypatch.setattr(release.shutil, "which", lambda name: None)
    monkeypatch.setattr(release.platform, "machine", lambda: "x86_64")
    with pytest.raises(StepError, match=r"apt-get install g\+\+-aarch64-linux-gnu"):
        release.build_wheel("aarch64")


def test_a_package_of_another_version_fails() -> None:
    with pytest.raises(StepError, match=r"kvant 0\.0\.1 was installed"):
        release.try_package(lambda *words: '{"kvant": "0.0.1"}')


def test_ci_builds_wheels_for_macos() -> None:
    assert "macos-" in release.check_macos()
