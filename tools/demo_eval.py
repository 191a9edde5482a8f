"""Measure how much the demo model needs its cache, and export it with a card.

Three measurements on held-out files: the cost of a short attention window, whether a random string
is copied from a thousand tokens back, and the loss compared with a 5-gram model.
"""

from __future__ import annotations

import json
import platform
import random
import string
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo_data import END, MARKER, Corpus, load_corpus

CONTEXT, SKIPPED_POSITIONS, WINDOW = 2048, 256, 64
TOKEN_BITS, NGRAM_ORDER = 12, 5
TRIALS, CUE_TOKENS = 64, 4
DISTANCES = (1000, 1600)


class NGram:
    """An interpolated Witten-Bell model of order five over token ids below 4096."""

    def __init__(self, stream: np.ndarray, vocab: int) -> None:
        self.vocab = vocab
        self.grams, self.contexts = [], []
        for order in range(1, NGRAM_ORDER + 1):
            grams, counts = np.unique(self._keys(stream, order), return_counts=True)
            contexts, first, num_types = np.unique(
                grams >> TOKEN_BITS, return_index=True, return_counts=True
            )
            self.grams.append((grams, counts))
            self.contexts.append((contexts, np.add.reduceat(counts, first), num_types))

    @staticmethod
    def _keys(tokens: np.ndarray, order: int) -> np.ndarray:
        count = len(tokens) - order + 1
        keys = np.zeros(count, dtype=np.int64)
        for offset in range(order):
            keys = (keys << TOKEN_BITS) | tokens[offset : offset + count]
        return keys

    def compute_probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """Return the probability of each token from the fifth on, given the four before it."""
        result = np.full(len(tokens) - NGRAM_ORDER + 1, 1.0 / self.vocab)
        for order, (grams, contexts) in enumerate(zip(self.grams, self.contexts, strict=True), 1):
            keys = self._keys(tokens, order)[NGRAM_ORDER - order :]
            hits = _look_up(keys, *grams)[0]
            totals, num_types = _look_up(keys >> TOKEN_BITS, *contexts)
            is_known = totals > 0
            interpolated = (hits + num_types * result) / np.where(is_known, totals + num_types, 1)
            result = np.where(is_known, interpolated, result)
        return result


def _look_up(keys: np.ndarray, table: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    """Return the columns at the keys, zero where the table lacks a key."""
    indices = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return [np.where(table[indices] == keys, column[indices], 0) for column in columns]


def cut_held_out_blocks(corpus: Corpus) -> np.ndarray:
    """Cut the long held-out files into blocks of the full context plus one token."""
    size = CONTEXT + 1
    return np.stack(
        [d[at : at + size] for d in corpus.held_out for at in range(0, len(d) - size + 1, size)]
    )


def make_window_mask(window: int) -> torch.Tensor:
    """Return a mask that lets every position see itself and the ``window - 1`` before it."""
    distance = torch.arange(CONTEXT)[:, None] - torch.arange(CONTEXT)[None, :]
    return ((distance >= 0) & (distance < window))[None, None]


@torch.no_grad()
def compute_mean_loss(model: PreTrainedModel, blocks: np.ndarray, window: int) -> float:
    """Return the loss past the first positions, with attention limited to a window."""
    mask = make_window_mask(window)
    losses = []
    for block in torch.from_numpy(blocks):
        logits = model(input_ids=block[None, :-1], attention_mask=mask, use_cache=False).logits
        losses.append(
            functional.cross_entropy(
                logits[0, SKIPPED_POSITIONS:].float(), block[1 + SKIPPED_POSITIONS :]
            )
        )
    return float(torch.stack(losses).mean())


def compute_ngram_loss(corpus: Corpus, vocab: int, blocks: np.ndarray) -> float:
    """Return the loss of the 5-gram model on the tokens that `compute_mean_loss` scores."""
    ngram = NGram(corpus.train, vocab)
    start = SKIPPED_POSITIONS + 1 - (NGRAM_ORDER - 1)
    return float(np.mean([-np.log(ngram.compute_probabilities(block[start:])) for block in blocks]))


def draw_random_string(tokenizer: Tokenizer, rng: random.Random, characters: bool) -> list[int]:
    """Return 24 random tokens, or the tokens of 32 random letters and digits."""
    if not characters:
        return [rng.randrange(1, tokenizer.get_vocab_size()) for _ in range(24)]
    return tokenizer.encode("".join(rng.choices(string.ascii_letters + string.digits, k=32))).ids


@torch.no_grad()
def continues_exactly(model: PreTrainedModel, prompt: list[int], rest: list[int]) -> bool:
    """Return whether greedy decoding continues the prompt with exactly the given tokens."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=len(rest),
        min_new_tokens=len(rest),
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist() == rest


def measure_copy_rate(
    model: PreTrainedModel, tokenizer: Tokenizer, corpus: Corpus, distance: int, characters: bool
) -> float:
    """Return how often a random string is recalled over `distance` tokens of held-out text."""
    rng = random.Random(distance)
    marker = tokenizer.encode(MARKER).ids
    texts = [d.tolist() for d in corpus.held_out if len(d) > distance + 200]
    successes = 0
    for _ in range(TRIALS):
        text = rng.choice(texts)
        start = rng.randrange(len(text) - distance - 199)
        passage = draw_random_string(tokenizer, rng, characters)
        end = start + 200
        prompt = text[start:end] + marker + passage + text[end : end + distance]
        successes += continues_exactly(
            model, prompt + marker + passage[:CUE_TOKENS], passage[CUE_TOKENS:]
        )
    return successes / TRIALS


def evaluate(folder: Path) -> dict[str, float]:
    """Return every measurement of the model in a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    vocab = model.config.vocab_size
    tokenizer, corpus = load_corpus(folder, vocab)
    blocks = cut_held_out_blocks(corpus)
    full, limited = (compute_mean_loss(model, blocks, window) for window in (CONTEXT, WINDOW))
    result = {
        "parameters": model.num_parameters(),
        "held_out_tokens": len(blocks) * (CONTEXT - SKIPPED_POSITIONS),
        "loss": full,
        "perplexity": float(np.exp(full)),
        "window_perplexity": float(np.exp(limited)),
        "window_cost": float(np.expm1(limited - full)),
        "ngram_loss": compute_ngram_loss(corpus, vocab, blocks),
    }
    for distance in DISTANCES:
        for kind in ("tokens", "characters"):
            result[f"copy_{kind}_{distance}"] = measure_copy_rate(
                model, tokenizer, corpus, distance, kind == "characters"
            )
    return {name: round(value, 4) for name, value in result.items()}


def read_curve(folder: Path, points: int = 24) -> list[dict[str, float]]:
    """Return evenly spaced entries of the training log that have a held-out loss."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [entry for entry in map(json.loads, lines) if "held_out" in entry]
    indices = np.linspace(0, len(entries) - 1, min(points, len(entries))).round().astype(int)
    return [entries[index] for index in indices]


def format_curve_table(entries: list[dict[str, float]]) -> str:
    """Return the loss curve as a Markdown table."""
    rows = [
        f"| {e['seconds'] / 60:.0f} | {e['tokens'] / 1e6:.1f} | {e['length']} "
        f"| {e['text']:.2f} | {e['held_out']:.2f} | {e['copied']:.3f} |"
        for e in entries
    ]
    head = "| minute | million tokens | length | text | held-out | copied |"
    return "\n".join([head, "|---:|---:|---:|---:|---:|---:|", *rows])


def format_measurement_table(measurements: dict[str, float]) -> str:
    """Return the measurements as a Markdown table."""
    copy_rows = [
        f"| random {string_kind} copied from {distance} tokens back | {rate:.0%} | {target} |"
        for distance in DISTANCES
        for string_kind in ("tokens", "characters")
        for rate in [measurements[f"copy_{string_kind}_{distance}"]]
        for target in ["at least 50%" if distance == 1000 else ""]
    ]
    rows = [
        "| measurement | value | aim |",
        "|---|---:|---|",
        f"| perplexity, full attention | {measurements['perplexity']:.2f} | |",
        f"| perplexity, window of {WINDOW} | {measurements['window_perplexity']:.2f} | |",
        f"| cost of the window | {measurements['window_cost']:+.1%} | at least +10% |",
        *copy_rows,
        f"| loss per token | {measurements['loss']:.3f} | below the 5-gram's |",
        f"| loss per token, 5-gram | {measurements['ngram_loss']:.3f} | |",
    ]
    return "\n".join(rows)


def export(folder: Path, target: Path) -> dict[str, float]:
    """Write the bfloat16 model, its tokenizer, its curve and its card; return the measurements."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(target)
    # save_pretrained makes it readable by its owner only, and a package keeps the mode.
    (target / "model.safetensors").chmod(0o644)
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": CONTEXT}
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    measurements = evaluate(target)
    entries = read_curve(folder)
    (target / "card_curve.json").write_text(
        json.dumps({"measurements": measurements, "curve": entries}, indent=1) + "\n"
    )
    last = json.loads((folder / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    size = (target / "model.safetensors").stat().st_size / 2**20
    card = CARD.format(
        count=measurements["parameters"] / 1e6,
        size=size,
        python=platform.python_version(),
        tokens=last["tokens"] / 1e6,
        minutes=last["seconds"] / 60,
        steps=last["step"],
        held=measurements["held_out_tokens"],
        skip=SKIPPED_POSITIONS,
        trials=TRIALS,
        measurements=format_measurement_table(measurements),
        curve=format_curve_table(entries),
    )
    (target / "card.md").write_text(card, encoding="utf-8")
    return measurements


CARD = """\
# The demo model

A {count:.2f} million parameter decoder (Qwen3 architecture, tied embeddings, {size:.1f} MiB in
bfloat16) for trying out and testing key-value caches where no other model is at hand. It continues
Python source; it is not a useful assistant or programmer. It was made to *need* its cache: it
repeats strings that it saw a thousand tokens earlier. Recall fades beyond that, because only the
last part of a run sees sequences of 2048.

- Layers 6, hidden 256, feed-forward 768, 4 query heads on 2 key-value heads of 64, context 2048,
  RoPE base 10000, byte-level BPE of 4096 tokens whose id 0 is `<|endoftext|>`.
- Load it with `AutoModelForCausalLM.from_pretrained(folder)` and
  `AutoTokenizer.from_pretrained(folder)`.

## Data and licence

The only text is the standard library of Python {python} without `site-packages` and the character
tables in `encodings`, under the PSF licence version 2 (https://docs.python.org/3/license.html),
which allows derived works; Copyright (c) 2001 Python Software Foundation, all rights reserved.
About 2% of the files, chosen by a hash of their path, are held out. Into a part of the training
sequences, passages of their own text, random tokens and random character strings are written a
second time, at a random distance, so that copying is learnt. The random strings carry no loss where
they first occur.

## Measurements

On the exported bfloat16 weights. Losses are in nats per token on {held} tokens of held-out files,
at positions past {skip} of blocks of 2048; the 5-gram model (interpolated Witten-Bell, same
training and same scored tokens) is the yardstick. Two long, repetitive test files hold most of
these tokens; averaged by file, the loss is higher. Copying: 200 tokens of held-out text, a marker,
24 random tokens (or 32 random letters and digits), held-out text of the given length, the marker,
the first 4 tokens of the string; a success is a greedy continuation that gives all the rest,
in {trials} trials each.

{measurements}

## Training

At the last entry of the log, {minutes:.0f} minutes on two shared CPU cores, {steps} steps and
{tokens:.1f} million tokens; Muon for the matrices and AdamW for the rest, sequence length growing
from 256 to 2048. `held-out` below is the loss on the first tokens of a few held-out files at the
length of the moment, `copied` the training loss inside repeated random strings.

{curve}

## How to make it again

```
python tools/train_demo.py --minutes 110 --out build/demo
python tools/train_demo.py --evaluate build/demo
python tools/train_demo.py --export build/demo src/kvant/demo
```

The data, its order and the seeds are fixed, but the schedule follows the clock, so another run
gives another model of the same kind.
"""
