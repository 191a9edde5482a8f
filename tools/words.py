"""Count words that an engineer of this field would have to look up.

`python tools/words.py` prints how often each marker stands in src/, docs/ and tests/, with
identifiers split into their words, and the same counts of the commit before (`--base REV`: of
another one). `--list WORD` prints each line with a word. `--check` fails above the bounds.

It also counts functions named by a bare participle or preposition, class names that two modules
define, and the most frequent participles: no synonym should take the place of a marker. The counts
are a reminder. What matters is that a sentence is understood when it is read once.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import typer

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "docs", "tests")
SUFFIXES = (".py", ".md", ".cpp", ".hpp", ".h", ".html")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of a sentence or an identifier


class Bounds(NamedTuple):
    """How often a marker may stand in each folder."""

    src: int
    docs: int
    tests: int


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


BOUNDS = {
    "told": Bounds(5, 5, 10),
    "nobody": Bounds(5, 5, 15),
    "somebody": Bounds(5, 5, 10),
    "whoever": Bounds(5, 5, 5),
    "so many": Bounds(5, 5, 5),
    "beside": Bounds(10, 10, 10),
    "behind": Bounds(10, 10, 10),
    "who": Bounds(5, 5, 10),
}
PREPOSITIONS = word_set(
    """
    about above after along among around at before behind below beneath beside besides between
    beyond by during except for from in inside into like near of off on onto out outside over past
    round since than through till to toward towards under until up upon with within without
    """
)
IRREGULAR = word_set(
    """
    become begun bound brought built chosen come done drawn driven fallen found fed forgotten frozen
    given gone grown had heard held hidden kept known laid led left lent lost made meant met paid
    ridden risen said seen sent shown shut spent spoken spread stood sunk swept sworn taken taught
    thought thrown told torn understood woken won worn wound written came took went began saw gave
    """
)
NO_PARTICIPLES = word_set("embed exceed feed indeed need proceed ragged seed speed succeed")
PROTOCOLS = frozenset({"done"})  # a method of concurrent.futures.Future
NUM_FREQUENT = 20


@dataclass
class Counts:
    """What stands in one tree of files."""

    markers: Counter[tuple[str, str]] = field(default_factory=Counter)  # by marker and folder
    participles: Counter[str] = field(default_factory=Counter)  # in src/
    functions: list[str] = field(default_factory=list)  # with a bad name, in src/
    classes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def repeated_classes(self) -> dict[str, list[str]]:
        return {name: places for name, places in self.classes.items() if len(places) > 1}

    def format_frequent(self) -> str:
        frequent = self.participles.most_common(NUM_FREQUENT)
        return ", ".join(f"{word} {count}" for word, count in frequent)


def split_words(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]


def is_participle(word: str) -> bool:
    return word in IRREGULAR or (word.endswith("ed") and word not in NO_PARTICIPLES)


def count_marker(words: Sequence[str], marker: str) -> int:
    first, *second = marker.split()
    if not second:
        return words.count(first)
    return sum(pair == (first, *second) for pair in pairwise(words))


def list_files(root: Path, folder: str) -> Iterator[Path]:
    return (path for path in sorted((root / folder).rglob("*")) if path.suffix in SUFFIXES)


def count_tree(root: Path) -> Counts:
    counts = Counts()
    for folder in FOLDERS:
        for path in list_files(root, folder):
            text = path.read_text(encoding="utf-8")
            words = split_words(text)
            for marker in BOUNDS:
                counts.markers[marker, folder] += count_marker(words, marker)
            if folder == "src" and path.suffix == ".py":
                counts.participles.update(filter(is_participle, words))
                _add_names(ast.parse(text), path.relative_to(root).as_posix(), counts)
    return counts


def _add_names(tree: ast.AST, path: str, counts: Counts) -> None:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                bare = name.strip("_").lower()
                is_bad = bare in PREPOSITIONS or ("_" not in bare and is_participle(bare))
                if is_bad and bare not in PROTOCOLS:
                    counts.functions.append(f"{path}:{node.lineno}: {name}")
            case ast.ClassDef(name=name):
                counts.classes[name.lstrip("_")].append(f"{path}:{node.lineno}")


def count_revision(revision: str) -> Counts:
    """Count in the files of a commit."""
    command = ["git", "archive", revision, *FOLDERS]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise typer.BadParameter(archive.stderr.decode().strip(), param_hint="--base")
    with TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
        return count_tree(Path(folder))


def find_lines(marker: str) -> Iterator[str]:
    """Each line of src/ with a marker."""
    for path in list_files(ROOT, "src"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if count_marker(split_words(line), marker):
                yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def find_errors(counts: Counts) -> list[str]:
    errors = [
        f"{marker}: {counts.markers[marker, folder]} in {folder}/, at most {bound} are allowed"
        for marker, bounds in BOUNDS.items()
        for folder, bound in bounds._asdict().items()
        if counts.markers[marker, folder] > bound
    ]
    errors += [f"{place}: name a function by a verb and its object" for place in counts.functions]
    for name, places in counts.repeated_classes.items():
        errors.append(f"class {name} is defined in {', '.join(places)}")
    return errors


def print_report(before: Counts, now: Counts) -> None:
    for marker in BOUNDS:
        cells = (
            f"{before.markers[marker, folder]} -> {now.markers[marker, folder]} in {folder}/"
            for folder in FOLDERS
        )
        print(f"{marker:10}", *(f"{cell:22}" for cell in cells))
    print(f"badly named functions: {len(before.functions)} -> {len(now.functions)}")
    print(f"class names used twice: {len(before.repeated_classes)} -> {len(now.repeated_classes)}")
    print(f"most frequent participles before: {before.format_frequent()}")
    print(f"most frequent participles now: {now.format_frequent()}")


def main(
    base: Annotated[str, typer.Option(help="commit to compare with")] = "HEAD~1",
    listed: Annotated[
        str | None, typer.Option("--list", metavar="WORD", help="print each line with this word")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="fail above the bounds")] = False,
) -> None:
    """Count words that an engineer of this field would have to look up."""
    if listed is not None:
        print(*find_lines(listed), sep="\n")
        return
    now = count_tree(ROOT)
    if not check:
        print_report(count_revision(base), now)
    elif errors := find_errors(now):
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    typer.run(main)
