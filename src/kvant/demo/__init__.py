"""The small language model inside the package; transformers loads it from `PATH`, see card.md."""

from pathlib import Path

PATH = Path(__file__).resolve().parent
