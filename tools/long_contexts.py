"""Measures what the model inside finds again where its tokens read some of the pages.

Three minutes: `python tools/long_contexts.py`. Texts of 2,048 tokens, which the model was not
trained on, with things planted in them are read whole; then it is asked for each by itself, and all
tokens of questions and answers read by the spec.
"""

from __future__ import annotations

from statistics import fmean

import torch

from kvant.bench.report import progress, show
from kvant.checkpoints import load
from kvant.eval.evaluation import cut
from kvant.probing.recall import KINDS, Recall, exams

FORMATS = (
    *("raw", "affine8", "affine8,select=50%", "affine8,select=25%", "affine8,select=12%"),
    *("affine8,window=1024,sinks=0", "affine8,window=704,sinks=0"),
    *("affine4", "affine4,select=25%"),
)
CONTEXT, EXAMS = 2048, 24


@torch.no_grad()
def main() -> None:
    model, tokenizer = load(None)
    text = cut(tokenizer, None, CONTEXT, EXAMS * CONTEXT)
    asked = exams(tokenizer, text.whole, EXAMS, seed=0)
    progress(f"{EXAMS} texts are read")
    recall = Recall.of(model, asked)
    rows = []
    for name in FORMATS:
        progress(name)
        shares = recall.shares(name)
        rows.append({"format": name} | {kind: fmean(shares[kind].values()) for kind in KINDS})
    progress("")
    show("recall of what was read whole", rows, {"exams": EXAMS, "context": CONTEXT}, quiet=False)


if __name__ == "__main__":
    main()
