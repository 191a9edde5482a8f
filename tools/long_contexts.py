"""Measure what the built-in model recalls if decoded tokens read only some of the pages.

`python tools/long_contexts.py` takes three minutes. Texts of 2,048 tokens, which the model was not
trained on, have planted items. A text is read with full attention; then each question is asked on
a fork, and the tokens of questions and answers read by the spec.
"""

from __future__ import annotations

from statistics import fmean

import torch

from kvant.bench.harness import print_report, show_progress
from kvant.probing.recall import PLANT_KINDS, RecallTest
from pruning import CONTEXT, load_exams

FORMATS = (
    *("raw", "affine8", "affine8,select=50%", "affine8,select=25%", "affine8,select=12%"),
    *("affine8,window=1024,sinks=0", "affine8,window=704,sinks=0"),
    *("affine4", "affine4,select=25%"),
)
NUM_EXAMS = 24


@torch.no_grad()
def main() -> None:
    model, _, exams = load_exams(NUM_EXAMS)
    show_progress(f"{NUM_EXAMS} texts are read")
    recall = RecallTest.from_exams(model, exams)
    rows = []
    for name in FORMATS:
        show_progress(name)
        shares = recall.measure_shares(name)
        rows.append({"format": name} | {kind: fmean(shares[kind].values()) for kind in PLANT_KINDS})
    show_progress("")
    facts = {"exams": NUM_EXAMS, "context": CONTEXT}
    print_report("recall after a full prefill", rows, facts, quiet=False)


if __name__ == "__main__":
    main()
