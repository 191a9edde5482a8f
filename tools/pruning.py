"""Measures what stays of the model inside where rows of a prompt are pruned, beside kvpress.

`python tools/pruning.py`, some minutes; what kvpress does is measured where it can be imported
(0.5.5 beside transformers 5 needs `pip install --no-deps kvpress cachetools`, and `datasets`).
Texts of 2,048 tokens, which the model was not trained on, have things planted in them. They are
read and pruned, before or after the first tokens of an answer are shown (the question), and the
model is asked for the rest. Perplexity is of the second half of a text, whose first half was
pruned. Rows are not quantized: so both libraries store the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvant
from kvant.bench.report import print_report, show_progress
from kvant.checkpoints import load
from kvant.eval.evaluation import split_text
from kvant.probing.recall import PLANT_KINDS, RecallExam, make_exams

CONTEXT = 2048
# A spec of ours, and what makes the same of kvpress: its own name, and what wraps it.
KVPRESS_SCORES = {
    "snapkv": ("SnapKVPress", None),
    "snapkv:adaptive": ("SnapKVPress", "AdaKVPress"),
    "expected": ("ExpectedAttentionPress", None),
    "expected:adaptive": ("ExpectedAttentionPress", "AdaKVPress"),
    "keydiff": ("KeyDiffPress", None),
    "tova": ("TOVAPress", None),
    "random": ("RandomPress", None),
}
PrefillFunction = Callable[[Tensor], Any]  # tokens [1, T] -> a cache that was pruned


@dataclass(frozen=True)
class PruningMethod:
    """One way to read a prompt, and to go on from it."""

    name: str
    prefill: PrefillFunction
    copy: Callable[[Any], Any]  # a cache for one of several continuations
    one_by_one: bool = False  # are tokens to be read one by one?


def make_kvant_method(model: Any, spec: str) -> PruningMethod:
    def read(ids: Tensor) -> Any:
        cache = kvant.cache_for(model, spec)
        model(ids, past_key_values=cache)
        cache.prune()
        return cache

    return PruningMethod(f"kvant {spec}", read, lambda cache: cache.fork())


def make_kvpress_method(model: Any, score: str, keep: float) -> PruningMethod:
    import kvpress

    own, wrapped = KVPRESS_SCORES[score]
    press = getattr(kvpress, own)(compression_ratio=1 - keep)
    if wrapped is not None:
        press = getattr(kvpress, wrapped)(press)

    def read(ids: Tensor) -> Any:
        cache = DynamicCache(config=model.config)
        with press(model):
            model.model(ids, past_key_values=cache, cache_position=torch.arange(ids.shape[1]))
        return cache

    def copied(cache: Any) -> Any:
        twin = DynamicCache(config=model.config)
        for index, layer in enumerate(cache.layers):
            twin.update(layer.keys.clone(), layer.values.clone(), index)
        return twin

    # It hides the rows of a head by a key that no query asks for, which many together have not.
    name = f"kvpress {own}{f' in {wrapped}' if wrapped else ''}"
    return PruningMethod(name, read, copied, one_by_one=wrapped is not None)


def compute_logits(
    model: Any, method: PruningMethod, ids: Tensor, start: int, cache: Any
) -> Tensor:
    """Of tokens behind so many, by their positions: a cache that was pruned may have fewer."""
    count = ids.shape[1]
    parts = []
    for first, stop in [(i, i + 1) for i in range(count)] if method.one_by_one else [(0, count)]:
        places = torch.arange(start + first, start + stop)[None]
        found = model(ids[:, first:stop], past_key_values=cache, position_ids=places)
        parts.append(found.logits[0].float())
    return torch.cat(parts)


def measure_perplexity(model: Any, method: PruningMethod, pieces: list[Tensor]) -> float:
    losses = []
    for piece in pieces:
        half = piece.shape[1] // 2
        found = compute_logits(
            model, method, piece[:, half:-1], half, method.prefill(piece[:, :half])
        )
        losses.append(torch.nn.functional.cross_entropy(found, piece[0, half + 1 :]).item())
    return float(torch.tensor(losses).mean().exp())


def measure_recall(
    model: Any, method: PruningMethod, all_exams: list[RecallExam], *, question_known: bool
) -> dict[str, float]:
    """The share of answers that greedy decoding gives, by kind; is the question known before?"""
    right: dict[str, list[bool]] = {kind: [] for kind in PLANT_KINDS}
    for exam in all_exams:
        whole = None if question_known else method.prefill(torch.tensor([exam.prompt]))
        for one in exam.planted:
            told = torch.tensor(one.answer)
            if question_known:
                cache = method.prefill(torch.tensor([exam.prompt + one.question[:-1]]))
            else:
                cache = method.copy(whole)
            behind = len(exam.prompt) + (len(one.question) - 1 if question_known else 0)
            rest = one.question[-1:] if question_known else one.question
            found = compute_logits(
                model, method, torch.tensor([rest + one.answer[:-1]]), behind, cache
            )
            right[one.kind].append(bool((found[-len(told) :].argmax(-1) == told).all()))
    return {kind: fmean(found) for kind, found in right.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=int, default=25, help="percent of the rows")
    parser.add_argument("--exams", type=int, default=8)
    parser.add_argument("--kvpress", action="store_true", help="measure it, too")
    parser.add_argument("--scores", default=",".join(KVPRESS_SCORES))
    given = parser.parse_args()
    model, tokenizer = load(None)
    text = split_text(tokenizer, None, CONTEXT, given.exams * CONTEXT)
    asked = make_exams(tokenizer, text.full_pieces, given.exams, seed=0)
    ways = [
        make_kvant_method(model, "raw"),
        make_kvant_method(model, f"raw,window={CONTEXT * given.keep // 100},sinks=4"),
    ]
    for score in given.scores.split(","):
        name, _, adaptive = score.partition(":")
        spec = f"raw,prune={name}:{given.keep}%" + (f":{adaptive}" if adaptive else "")
        ways.append(make_kvant_method(model, spec))
        if given.kvpress:
            ways.append(make_kvpress_method(model, score, given.keep / 100))
    rows = []
    for way in ways:
        show_progress(way.name)
        row: dict[str, Any] = {
            "read": way.name,
            "perplexity": measure_perplexity(model, way, text.full_pieces),
        }
        for known in (False, True):
            shares = measure_recall(model, way, asked, question_known=known)
            row |= {f"{kind}{', asked' if known else ''}": shares[kind] for kind in PLANT_KINDS}
        rows.append(row)
    show_progress("")
    about = {"exams": given.exams, "context": CONTEXT, "keep": f"{given.keep}%"}
    print_report("what stays of a prompt that is pruned", rows, about, quiet=False)


if __name__ == "__main__":
    main()
