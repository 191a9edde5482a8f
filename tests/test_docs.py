"""Run the examples of the documents in order, one session per document.

Commands that would take hours, or need a checkpoint, a server or keys, are only parsed: their
names, options and values are right.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import kvant
from kvant.bench.markdown import format_markdown
from kvant.cli.main import BENCHES, app, main
from kvant.spec.formats import AUTO_WORD, FORMAT_WORDS
from kvant.spec.options import OPTION_PARSERS as KNOWN
from kvant.spec.options import OPTION_WORDS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)
TABLES = "docs/coming-from.md"  # its code blocks run together with its tables
WITH_PYTHON = [
    page for page in PAGES if page != TABLES and "```python\n" in (ROOT / page).read_text()
]
SHORT = ("README.md", "docs/index.md", "docs/formats.md", "docs/tutorials/")  # run to their end
NOT_HERE = ("kvant serve", "PATH_OR_ID", "Qwen/", "smollm2", "$")
MODULE = "python -m kvant.bench."
LESS = {"run": ["--max-new-tokens", "20"], "eval": ["--tokens", "512", "--prompts", "1"]}


def list_commands(page: str) -> list[list[str]]:
    """Return the lines of a page that call `kvant`, or a benchmark as a module."""
    commands = []
    for line in re.findall(r"^    (\S.*)$", (ROOT / page).read_text(), re.M):
        line = line.removeprefix(".venv/bin/")
        if line.startswith(("kvant ", MODULE)) and "$" not in line:
            words = shlex.split(line.replace(MODULE, "kvant bench ", 1), comments=True)
            ends = [n for n, word in enumerate(words) if word in (">", ">>", "&&")]
            commands.append(words[: min(ends, default=None)])
    return commands


def run_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n/quit\n" if "chat" in words else ""))
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code, shlex.join(words)


def assert_parses(words: list[str]) -> None:
    """Assert that the parser accepts these words."""
    command, rest = typer.main.get_command(app), words[1:]
    context = command.make_context("kvant", rest)
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, list(rest), parent=context)
    assert context.command.callback is not None


@pytest.fixture(scope="module")
def shared_verdicts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("verdicts"))


@pytest.fixture
def folder(
    tmp_path: Path, shared_verdicts: str, quick_trials: None, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Create the files that the commands use; check a format once for all pages, on less text."""
    monkeypatch.setenv("XDG_CACHE_HOME", shared_verdicts)
    shutil.copy(ROOT / "CONTRIBUTING.md", tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "import os"}\n{"prompt": "class A"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_python(page: str) -> dict[str, Any]:
    """Run the Python of a page in one session, and return its names."""
    names: dict[str, Any] = {"__name__": "page"}
    sys.modules["page"] = type(sys)("page")  # dataclasses look up the module of a class
    text = (ROOT / page).read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_examples_run(page: str, folder: Path) -> None:
    run_python(page)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith(SHORT)])
def test_command_examples_run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in list_commands(page):
        if not any(text in shlex.join(words) for text in NOT_HERE):
            run_command(words + LESS.get(words[1], []), monkeypatch)


@pytest.mark.skipif(not shutil.which("make"), reason="make is missing")
def test_demo_of_the_makefile_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = subprocess.run(["make", "-n", "demo"], capture_output=True, text=True, check=True)
    lines = recipe.stdout.replace("\\\n", " ").splitlines()
    (words,) = [shlex.split(line) for line in lines if "bin/kvant " in line]
    run_command(["kvant", *words[1:], *LESS["run"]], monkeypatch)


@pytest.mark.parametrize("page", [page for page in PAGES if list_commands(page)])
def test_commands_exist(page: str) -> None:
    for words in list_commands(page):
        if words[:3] != ["kvant", "bench", "markdown"]:
            assert_parses(words)


def test_table_commands_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run blocks, and code in the second column: Python, or a kvant command.

    Commands run with smaller sizes, and no server is started.
    """
    path = ROOT / TABLES
    names: dict[str, object] = {}
    blocks = re.findall(
        r"^```python\n(.*?)^```|^\|.*?\|(.*?)\|", path.read_text(), re.DOTALL | re.M
    )
    assert blocks
    for block, cell in blocks:
        for code in [block] if block else re.findall(r"`(.*?)`", cell):
            words = shlex.split(code) if code.startswith("kvant ") else []
            if words and code.startswith(NOT_HERE[0]):
                assert_parses(words)
            elif words:
                run_command(words + LESS.get(words[1], []), monkeypatch)
            else:
                exec(compile(code, f"{path}: {code}", "exec"), names)


def test_every_benchmark_is_documented() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    assert [name for name in BENCHES if not re.search(rf"bench[. ]{name}\b", text)] == []


def test_formats_page_equals_the_guide() -> None:
    text = (ROOT / "docs" / "formats.md").read_text()
    formats = [
        {"format": f"`{word.word}`", "what it is": word.meaning, "use it for": word.use_case}
        for word in (*FORMAT_WORDS, AUTO_WORD)
    ]
    options = [
        {"option": f"`{word.word}`", "default": word.default}
        | {"what it does": word.meaning, "use it for": word.use_case}
        for word in OPTION_WORDS
    ]
    assert format_markdown(formats) in text and format_markdown(options) in text
    assert {word.word.partition("=")[0] for word in OPTION_WORDS} == set(KNOWN)


def test_reference_lists_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    listed = re.findall(r"^::: kvant\.(\w+)$", text, re.M)
    assert {*kvant.__all__} == {*listed}
    (members,) = re.findall(r"members: \[(.*)\]", text)
    assert {*kvant.types.__all__} == {*members.split(", ")}


def test_a_codec_of_the_guide_is_as_good_as_it_says(folder: Path) -> None:
    """Regression: 4 sinks and 256 rows were compared with the last 260, an error of 5.1."""
    names = run_python("docs/extending.md")
    assert names["keys"].shape[2] == 260 and names["error"] < 0.03
