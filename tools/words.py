"""Count words that an engineer of this field would have to look up.

`python tools/words.py` prints how often each marker is in src/, docs/ and tests/, with identifiers
split into their words. `--check` instead fails above the bounds, for functions of src/ named by a
bare participle or preposition, and for class names that two of its modules define. The counts are a
reminder. What matters is that a sentence is understood when it is read once.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = (".py", ".md", ".cpp", ".hpp", ".h", ".html")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of a sentence or an identifier
FOLDERS = ("src", "docs", "tests")


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


BOUNDS = {  # how often a marker may be in each folder
    "told": (5, 5, 10),
    "nobody": (5, 5, 15),
    "somebody": (5, 5, 10),
    "whoever": (5, 5, 5),
    "so many": (5, 5, 5),
    "beside": (10, 10, 10),
    "behind": (10, 10, 10),
    "who": (5, 5, 10),
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


def read_files(folder: str) -> dict[str, str]:
    """Return the texts of a folder by path."""
    paths = (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES)
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def count_marker(marker: str, texts: dict[str, str]) -> Counter[str]:
    """Return how often a marker is in each file."""
    pattern = re.compile(rf"\b{marker}\b")
    words = {path: " ".join(WORD.findall(text)).lower() for path, text in texts.items()}
    return +Counter({path: len(pattern.findall(text)) for path, text in words.items()})


def is_participle(word: str) -> bool:
    return word in IRREGULAR or (word.endswith("ed") and word not in NO_PARTICIPLES)


def find_bad_names(texts: dict[str, str]) -> Iterator[str]:
    classes: dict[str, list[str]] = defaultdict(list)
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    bare = name.strip("_").lower()
                    is_bad = bare in PREPOSITIONS or ("_" not in bare and is_participle(bare))
                    if is_bad and bare not in PROTOCOLS:
                        place = f"{path}:{node.lineno}"
                        yield f"{place}: {name}: name a function by a verb and its object"
                case ast.ClassDef(name=name):
                    classes[name.lstrip("_")].append(f"{path}:{node.lineno}")
    for name, places in classes.items():
        if len(places) > 1:
            yield f"class {name} is defined in {', '.join(places)}"


def main() -> None:
    check = "--check" in sys.argv[1:]
    texts = {folder: read_files(folder) for folder in FOLDERS}
    python = {path: text for path, text in texts["src"].items() if path.endswith(".py")}
    errors = [*find_bad_names(python)]
    for marker, bounds in BOUNDS.items():
        counts = {folder: count_marker(marker, texts[folder]) for folder in FOLDERS}
        if not check:
            print(f"{marker:10}", *(f"{c.total():4} in {folder}/" for folder, c in counts.items()))
        errors += [
            f"{marker}: {c.total()} in {folder}/, at most {bound} are allowed: {', '.join(c)}"
            for (folder, c), bound in zip(counts.items(), bounds, strict=True)
            if c.total() > bound
        ]
    if check and errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
