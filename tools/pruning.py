"""Measure what the built-in model recalls after its prompt was pruned, by kvant and by kvpress.

`python tools/pruning.py` takes some minutes; `--kvpress` measures kvpress, too (0.5.5 with
transformers 5 needs `pip install --no-deps kvpress cachetools`, and `datasets`). Texts of 2,048
tokens, which the model was not trained on, have planted items. A text is read and pruned, before or
after the question, and the model continues with the answer. Perplexity is measured on the second
half of a text whose first half was pruned. Rows are not quantized, so both libraries store the
same. `kvzip` repeats a text after it: `--context 1024` leaves positions for that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvant.bench.harness import print_report, show_progress
from kvant.checkpoints import load
from kvant.eval.evaluation import split_text
from kvant.generation.decoder import TransformersDecoder
from kvant.generation.prefiller import Prefiller
from kvant.generation.second_pass import SecondPass
from kvant.probing.recall import PLANT_KINDS, RecallExam, make_exams

# A score of kvant's spec language: kvpress's press, and a press that wraps it.
KVPRESS_SCORES = {
    "snapkv": ("SnapKVPress", None),
    "snapkv:adaptive": ("SnapKVPress", "AdaKVPress"),
    "expected": ("ExpectedAttentionPress", None),
    "expected:adaptive": ("ExpectedAttentionPress", "AdaKVPress"),
    "keydiff": ("KeyDiffPress", None),
    "tova": ("TOVAPress", None),
    "random": ("RandomPress", None),
}


def make_texts(tokenizer: Any, count: int, context: int) -> tuple[list[Tensor], list[RecallExam]]:
    """Return `count` texts, and the texts with planted items."""
    pieces = split_text(tokenizer, None, context, count * context).full_pieces
    return pieces, make_exams(tokenizer, pieces, count, seed=0)


@dataclass(frozen=True)
class PruningMethod:
    """A method to read and prune a prompt."""

    name: str
    prefill: Callable[[Tensor], Any]  # tokens [1, T] -> a pruned cache
    one_by_one: bool = False  # whether tokens after it must be decoded one by one


def make_kvant_method(model: Any, tokenizer: Any, spec: str) -> PruningMethod:
    decoder = TransformersDecoder(model)

    def prefill(ids: Tensor) -> Any:
        cache = decoder.make_cache(spec)
        second_pass = SecondPass.from_spec(cache.spec, tokenizer, decoder.max_context)
        Prefiller(decoder, cache, ids.shape[1], second_pass=second_pass).prefill(ids[0].tolist())
        cache.prune()
        return cache

    return PruningMethod(f"kvant {spec}", prefill)


def make_kvpress_method(model: Any, score: str, keep: float) -> PruningMethod:
    import kvpress

    press_name, wrapper_name = KVPRESS_SCORES[score]
    press = getattr(kvpress, press_name)(compression_ratio=1 - keep)
    if wrapper_name is not None:
        press = getattr(kvpress, wrapper_name)(press)

    def prefill(ids: Tensor) -> Any:
        cache = DynamicCache(config=model.config)
        with press(model):
            model.model(ids, past_key_values=cache, cache_position=torch.arange(ids.shape[1]))
        return cache

    # It masks rows of a head by a key that no query matches, which works for one query only.
    name = f"kvpress {press_name}{f' in {wrapper_name}' if wrapper_name else ''}"
    return PruningMethod(name, prefill, one_by_one=wrapper_name is not None)


def compute_logits(
    model: Any, method: PruningMethod, ids: Tensor, start: int, cache: Any
) -> Tensor:
    """Return logits of tokens at positions from `start`: a pruned cache may be shorter."""
    count = ids.shape[1]
    parts = []
    for begin, stop in [(i, i + 1) for i in range(count)] if method.one_by_one else [(0, count)]:
        positions = torch.arange(start + begin, start + stop)[None]
        output = model(ids[:, begin:stop], past_key_values=cache, position_ids=positions)
        parts.append(output.logits[0].float())
    return torch.cat(parts)


def measure_perplexity(model: Any, method: PruningMethod, pieces: list[Tensor]) -> float:
    losses = []
    for piece in pieces:
        half = piece.shape[1] // 2
        logits = compute_logits(
            model, method, piece[:, half:-1], half, method.prefill(piece[:, :half])
        )
        losses.append(torch.nn.functional.cross_entropy(logits, piece[0, half + 1 :]).item())
    return float(torch.tensor(losses).mean().exp())


def measure_recall(
    model: Any, method: PruningMethod, all_exams: list[RecallExam], *, question_known: bool
) -> dict[str, float]:
    """Return the share of answers that greedy decoding gives, by kind.

    With `question_known` the question is read before the prune, without its last token.
    """
    results: dict[str, list[bool]] = {kind: [] for kind in PLANT_KINDS}
    for exam in all_exams:
        pruned = None if question_known else method.prefill(torch.tensor([exam.prompt]))
        for item in exam.planted:
            num_read = len(item.question) - 1 if question_known else 0
            prompt, question = exam.prompt + item.question[:num_read], item.question[num_read:]
            cache = method.prefill(torch.tensor([prompt])) if question_known else deepcopy(pruned)
            ids = torch.tensor([question + item.answer[:-1]])
            logits = compute_logits(model, method, ids, len(prompt), cache)
            answer = logits[-len(item.answer) :].argmax(-1).tolist()
            results[item.kind].append(answer == item.answer)
    return {kind: fmean(correct) for kind, correct in results.items()}


def measure_prefill(method: PruningMethod, exam: RecallExam) -> float:
    """Return the processor seconds in which a text is read and pruned."""
    start = time.process_time()
    method.prefill(torch.tensor([exam.prompt]))
    return time.process_time() - start


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=int, default=25, help="Percent of the rows to keep")
    parser.add_argument("--exams", type=int, default=8, help="Texts with planted items")
    parser.add_argument("--context", type=int, default=2048, help="Tokens of a text")
    parser.add_argument("--kvpress", action="store_true", help="Measure kvpress, too")
    parser.add_argument("--asked", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--scores", default=",".join(KVPRESS_SCORES))
    options = parser.parse_args()
    model, tokenizer = load(None)
    context = options.context
    pieces, exams = make_texts(tokenizer, options.exams, context)
    methods = [
        make_kvant_method(model, tokenizer, "raw"),
        make_kvant_method(model, tokenizer, f"raw,window={context * options.keep // 100},sinks=4"),
    ]
    for score in options.scores.split(","):
        name, _, adaptive = score.partition(":")
        spec = f"raw,prune={name}:{options.keep}%" + (f":{adaptive}" if adaptive else "")
        methods.append(make_kvant_method(model, tokenizer, spec))
        if options.kvpress and score in KVPRESS_SCORES:
            methods.append(make_kvpress_method(model, score, options.keep / 100))
    rows = []
    for method in methods:
        show_progress(method.name)
        perplexity = measure_perplexity(model, method, pieces)
        row: dict[str, Any] = {"read": method.name, "perplexity": perplexity}
        row["cpu_s"] = measure_prefill(method, exams[0])
        for question_known, suffix in ((False, ""), (True, ", asked"))[: 1 + options.asked]:
            shares = measure_recall(model, method, exams, question_known=question_known)
            row |= {f"{kind}{suffix}": share for kind, share in shares.items()}
        rows.append(row)
    show_progress("")
    facts = {"exams": options.exams, "context": context, "keep": f"{options.keep}%"}
    print_report("recall after a prune", rows, facts, quiet=False)


if __name__ == "__main__":
    main()
