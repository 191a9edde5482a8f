"""Corpus, tokenizer and training sequences of the demo model.

The text is the standard library of the running interpreter (PSF licence). Training sequences are
slices of it into which passages are written a second time, so that a model can only predict the
second occurrence by looking back at the first one.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvant.demo import is_held_out, list_library_files

END = "<|endoftext|>"
MARKER = "\n# recall: "
IGNORED_TARGET = -100


@dataclass(frozen=True)
class Corpus:
    """Token ids of the two splits; `held_out` is one array per file."""

    train: np.ndarray
    held_out: list[np.ndarray]


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE whose id 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Encode documents, each followed by the end token."""
    return [
        np.array([*coded.ids, 0], dtype=np.int64)
        for coded in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]


def load_corpus(folder: Path, vocab: int) -> tuple[Tokenizer, Corpus]:
    """Read the library; train a tokenizer in `folder` if there is none."""
    files = list_library_files()
    train = [text for name, text in files if not is_held_out(name)]
    held_out = [text for name, text in files if is_held_out(name)]
    tokenizer_file = folder / "tokenizer.json"
    if tokenizer_file.exists():
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    else:
        tokenizer = train_tokenizer(train, vocab)
        tokenizer.save(str(tokenizer_file))
    return tokenizer, Corpus(np.concatenate(encode(tokenizer, train)), encode(tokenizer, held_out))


def draw_random_text(rng: random.Random) -> str:
    """Return one random identifier, hexadecimal or alphanumeric string."""
    alphabet = rng.choice(
        [string.ascii_lowercase, "0123456789abcdef", string.ascii_letters + string.digits + "_"]
    )
    length = rng.randint(4, 40)
    return "".join(rng.choices(alphabet, k=length))


class TrainingSampler:
    """Draws training batches with repeated passages from a token stream."""

    def __init__(self, tokenizer: Tokenizer, stream: np.ndarray, seed: int) -> None:
        self.stream = stream
        self.vocab = tokenizer.get_vocab_size()
        self.rng = np.random.default_rng(seed)
        self.marker = np.array(tokenizer.encode(MARKER).ids)
        source = random.Random(seed)
        texts = [draw_random_text(source) for _ in range(20000)]
        self.pool = np.concatenate([c.ids for c in tokenizer.encode_batch(texts)])

    def draw_text(self, length: int) -> np.ndarray:
        """Return a random slice of the stream."""
        start = int(self.rng.integers(len(self.stream) - length))
        return self.stream[start : start + length].copy()

    def draw_noise(self, length: int) -> np.ndarray:
        """Return random tokens, or tokens of random character strings."""
        if self.rng.random() < 0.6:
            return self.rng.integers(1, self.vocab, length)
        start = int(self.rng.integers(len(self.pool) - length))
        return self.pool[start : start + length].copy()

    def draw_sequence(
        self, length: int, copies: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, targets and a mask of the targets that repeat a random string."""
        tokens = self.draw_text(length + 1)
        ignored = np.zeros(length + 1, dtype=bool)
        repeated = np.zeros(length + 1, dtype=bool)
        if self.rng.random() < copies:
            self._write_pairs(tokens, ignored, repeated)
        targets = np.where(ignored, IGNORED_TARGET, tokens)
        return tokens[:-1], targets[1:], repeated[1:]

    def _write_pairs(self, tokens: np.ndarray, ignored: np.ndarray, repeated: np.ndarray) -> None:
        cell = int(self.rng.choice([20, 40, 80]))
        cells = self.rng.permutation(len(tokens) // cell)
        pairs = int(self.rng.integers(1, min(len(cells) // 2, 10) + 1))
        for first, second in cells[: 2 * pairs].reshape(-1, 2):
            early, late = sorted((int(first) * cell, int(second) * cell))
            size = int(self.rng.integers(cell // 2, cell - 1))
            if self.rng.random() < 0.25:
                tokens[late : late + size] = tokens[early : early + size]
                continue
            self._write_noise(tokens, ignored, repeated, (early, late, size))

    def _write_noise(
        self,
        tokens: np.ndarray,
        ignored: np.ndarray,
        repeated: np.ndarray,
        passage_range: tuple[int, int, int],
    ) -> None:
        early, late, size = passage_range
        passage = self.draw_noise(size)
        head = 0
        if self.rng.random() < 0.5:
            head = min(len(self.marker), size - 4)
            passage[:head] = self.marker[:head]
        tokens[early : early + size] = passage
        tokens[late : late + size] = passage
        # The first occurrence and the choice of the passage cannot be predicted: no loss there.
        ignored[early + head : early + size] = True
        ignored[late : late + head + 1] = True
        repeated[late + head + 1 : late + size] = True

    def draw_batch(self, rows: int, length: int, copies: float) -> tuple[np.ndarray, ...]:
        """Return stacked tokens, targets and repeat masks."""
        sequences = [self.draw_sequence(length, copies) for _ in range(rows)]
        return tuple(np.stack(column) for column in zip(*sequences, strict=True))
