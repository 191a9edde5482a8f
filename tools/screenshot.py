"""Draws docs/terminal.svg: what the command line says, as it says it.

    python tools/screenshot.py

Runs the commands below and paints their output, colours and all.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "terminal.svg"
WIDTH = 92
FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # a picture loads nothing from elsewhere
COMMANDS = (
    'kvant run --kv-cache affine4 --prompt "class Pipe:" --repetition-penalty 1.15 '
    "--temperature 0.5 --seed 1 --max-new-tokens 60",
    "kvant formats affine4,window=4096",
    "kvant plan --context 2048 --budget 64MiB",
)


def capture_output(command: str) -> str:
    """What a command prints on a terminal of this width."""
    program, *words = shlex.split(command)
    path = str(Path(sys.executable).with_name(program))
    told = os.environ | {"COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    done = subprocess.run(
        [path, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=told
    )
    return done.stdout


def main() -> None:
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    for command in COMMANDS:
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(capture_output(command)))
    picture = console.export_svg(title="kvant")
    PICTURE.write_text(FONT.sub("", picture), encoding="utf-8")


if __name__ == "__main__":
    main()
