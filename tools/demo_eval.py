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
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo_data import END, MARKER, Corpus, load_corpus
from kvant.demo import PATH
from kvant.probing import measure_divergence
from pages import format_table, write_tables

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


def compute_mean_losses(model: PreTrainedModel, blocks: np.ndarray) -> tuple[float, float]:
    """Return the loss past the first positions, with full attention and within `WINDOW`."""
    pieces = torch.from_numpy(blocks)[:, None]
    divergence = measure_divergence(model, pieces, f"raw,window={WINDOW},sinks=0")
    full, limited = (
        float(losses.view(-1, CONTEXT)[:, SKIPPED_POSITIONS:].mean())
        for losses in (divergence.raw_loss, divergence.loss)
    )
    return full, limited


def compute_ngram_loss(corpus: Corpus, vocab: int, blocks: np.ndarray) -> float:
    """Return the loss of the 5-gram model on the tokens that `compute_mean_losses` scores."""
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
    logits = model(torch.tensor([prompt + rest[:-1]]), logits_to_keep=len(rest)).logits[0]
    return logits.argmax(-1).tolist() == rest


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
    full, limited = compute_mean_losses(model, blocks)
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
    return format_table(
        [
            {
                "minute": f"{entry['seconds'] / 60:.0f}",
                "million tokens": f"{entry['tokens'] / 1e6:.1f}",
                "length": entry["length"],
                "text": f"{entry['text']:.2f}",
                "held-out": f"{entry['held_out']:.2f}",
                "copied": f"{entry['copied']:.3f}",
            }
            for entry in entries
        ]
    )


def format_measurement_table(measurements: dict[str, float]) -> str:
    """Return the measurements as a Markdown table."""
    lines = {
        "perplexity, full attention": (f"{measurements['perplexity']:.2f}", ""),
        f"perplexity, window of {WINDOW}": (f"{measurements['window_perplexity']:.2f}", ""),
        "cost of the window": (f"{measurements['window_cost']:+.1%}", "at least +10%"),
    }
    for distance in DISTANCES:
        for kind in ("tokens", "characters"):
            rate = f"{measurements[f'copy_{kind}_{distance}']:.0%}"
            aim = "at least 50%" if distance == 1000 else ""
            lines[f"random {kind} copied from {distance} tokens back"] = (rate, aim)
    lines["loss per token"] = (f"{measurements['loss']:.3f}", "below the 5-gram's")
    lines["loss per token, 5-gram"] = (f"{measurements['ngram_loss']:.3f}", "")
    return format_table(
        [{"measurement": name, "value": value, "aim": aim} for name, (value, aim) in lines.items()]
    )


def export(folder: Path, target: Path) -> dict[str, float]:
    """Write the bfloat16 model, its tokenizer and its card; return the measurements."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(target)
    weights, card = target / "model.safetensors", target / "card.md"
    # save_pretrained makes it readable by its owner only, and a package keeps the mode.
    weights.chmod(0o644)
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": CONTEXT}
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    measurements = evaluate(target)
    last = json.loads((folder / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    facts = {
        "million parameters": f"{measurements['parameters'] / 1e6:.2f}",
        "MiB in bfloat16": f"{weights.stat().st_size / 2**20:.1f}",
        "Python whose library is the text": platform.python_version(),
        "held-out tokens measured": f"{measurements['held_out_tokens']:.0f}",
        "minutes of training": f"{last['seconds'] / 60:.0f}",
        "steps": f"{last['step']}",
        "million tokens read": f"{last['tokens'] / 1e6:.1f}",
    }
    card.write_bytes((PATH / "card.md").read_bytes())  # its text, with this model's tables
    write_tables(
        card,
        {
            "facts": format_table([{"fact": k, "value": v} for k, v in facts.items()]),
            "measurements": format_measurement_table(measurements),
            "curve": format_curve_table(read_curve(folder)),
        },
    )
    return measurements
