"""Draw docs/terminal.svg: the output of commands on a terminal, with its colours.

python tools/screenshot.py
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
FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # the picture must not load remote files
COMMANDS = (
    'kvant run --kv-cache affine4 --prompt "class Pipe:" --repetition-penalty 1.15 '
    "--temperature 0.5 --seed 1 --max-new-tokens 60",
    "kvant formats affine4,window=4096",
    "kvant plan --context 2048 --budget 64MiB",
)


def capture_output(command: str) -> str:
    """Return the output of a command on a terminal of this width."""
    program, *words = shlex.split(command)
    path = str(Path(sys.executable).with_name(program))
    environment = os.environ | {"COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    process = subprocess.run(
        [path, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    return process.stdout


def main() -> None:
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    for command in COMMANDS:
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(capture_output(command)))
    picture = console.export_svg(title="kvant")
    PICTURE.write_text(FONT.sub("", picture), encoding="utf-8")


if __name__ == "__main__":
    main()
