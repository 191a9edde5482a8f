"""Train, evaluate and export the small language model that ships with the package.

    python tools/train_demo.py --minutes 110 --out build/demo
    python tools/train_demo.py --evaluate build/demo
    python tools/train_demo.py --export build/demo src/kvant/demo

The learning rate and the sequence length follow the elapsed time, so a run always ends annealed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo_data import IGNORED_TARGET, Corpus, TrainingSampler, load_corpus
from demo_eval import evaluate, export, format_measurement_table

VOCAB = 4096
SEED = 1
# From this fraction of the run: sequence length, rows, share of sequences with repeats.
STAGES = ((0.0, 256, 16, 0.6), (0.14, 512, 8, 0.5), (0.34, 1024, 6, 0.4), (0.60, 2048, 4, 0.35))
WARM_UP_SHARE, COOL_DOWN_FROM = 0.01, 0.5
MATRIX_RATE, VECTOR_RATE = 4e-3, 3e-3
LOG_EVERY = 50
SAVE_SECONDS = 300


def build_model() -> Qwen3ForCausalLM:
    """Return an untrained model in float32."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for everything else."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    matrix_ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in matrix_ids]
    return [
        torch.optim.Muon(
            matrices, lr=MATRIX_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=VECTOR_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def find_stage(progress_share: float) -> tuple[int, int, float]:
    """Return length, rows and share of repeats at a fraction of the run."""
    _, length, rows, copies = [stage for stage in STAGES if stage[0] <= progress_share][-1]
    return length, rows, copies


def compute_rate_factor(progress_share: float) -> float:
    """Return the factor on the learning rates at a fraction of the run."""
    if progress_share < WARM_UP_SHARE:
        return max(progress_share / WARM_UP_SHARE, 0.02)
    return min(1.0, (1.0 - progress_share) / (1.0 - COOL_DOWN_FROM))


def compute_token_losses(
    model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the loss of every target, in bfloat16 arithmetic."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    flat = functional.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED_TARGET,
        reduction="none",
    )
    return flat.view_as(targets)


def compute_held_out_loss(model: torch.nn.Module, corpus: Corpus, length: int) -> float:
    """Return the loss on the first tokens of some held-out files."""
    rows = [d[: length + 1] for d in corpus.held_out if len(d) > length][:8]
    block = torch.from_numpy(np.stack(rows))
    with torch.no_grad():
        return float(compute_token_losses(model, block[:, :-1], block[:, 1:]).mean())


def train_step(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batch: tuple[np.ndarray, ...],
    factor: float,
) -> tuple[float, float]:
    """Take one step; return the loss on text and on repeated random strings."""
    tokens, targets, repeated = (torch.from_numpy(part) for part in batch)
    losses = compute_token_losses(model, tokens, targets)
    is_scored = targets != IGNORED_TARGET
    (losses.sum() / is_scored.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("base", group["lr"]) * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    losses = losses.detach()
    return float(losses[is_scored & ~repeated].mean()), float(losses[repeated].mean())


@dataclass
class TrainingLog:
    """Losses since the last entry of the log file, and counts."""

    path: Path
    step: int = 0
    tokens: int = 0
    recent: list[tuple[float, float]] = field(default_factory=list)

    def add_step(self, tokens: int, losses: tuple[float, float]) -> None:
        """Count one step."""
        self.step += 1
        self.tokens += tokens
        self.recent.append(losses)

    def write_entry(self, seconds: float, length: int, held_out: float | None = None) -> None:
        """Append the mean of the recent losses to the log."""
        text, copied = np.nanmean(np.array(self.recent), axis=0)
        entry = {"step": self.step, "tokens": self.tokens, "seconds": round(seconds, 1)}
        entry |= {"length": length, "text": round(text, 4), "copied": round(copied, 4)}
        entry |= {} if held_out is None else {"held_out": round(held_out, 4)}
        with self.path.open("a", encoding="utf-8") as log:
            print(json.dumps(entry), file=log)
        self.recent.clear()


def train(out: Path, minutes: float) -> None:
    """Train for a number of minutes; log and save to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer, corpus = load_corpus(out, VOCAB)
    sampler = TrainingSampler(tokenizer, corpus.train, SEED)
    model = build_model()
    optimizers = build_optimizers(model)
    compiled = torch.compile(model, dynamic=False)
    progress = TrainingLog(out / "log.jsonl")
    progress.path.write_text("")
    start = last_save = time.monotonic()
    while (share := (time.monotonic() - start) / (60 * minutes)) < 1.0:
        length, rows, copies = find_stage(share)
        batch = sampler.draw_batch(rows, length, copies)
        progress.add_step(
            rows * length, train_step(compiled, optimizers, batch, compute_rate_factor(share))
        )
        if progress.step % LOG_EVERY == 0:
            is_fourth = progress.step % (4 * LOG_EVERY) == 0
            held_out = compute_held_out_loss(model, corpus, length) if is_fourth else None
            progress.write_entry(time.monotonic() - start, length, held_out)
        if time.monotonic() - last_save > SAVE_SECONDS:
            model.save_pretrained(out)
            last_save = time.monotonic()
    if progress.recent:
        held_out = compute_held_out_loss(model, corpus, length)
        progress.write_entry(time.monotonic() - start, length, held_out)
    model.save_pretrained(out)


def main() -> None:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=110)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", type=Path, metavar="DIR")
    parser.add_argument("--export", type=Path, nargs=2, metavar=("DIR", "TARGET"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.evaluate or options.export:
        measurements = evaluate(options.evaluate) if options.evaluate else export(*options.export)
        print(format_measurement_table(measurements))
        print(json.dumps(measurements))
    else:
        train(options.out, options.minutes)


if __name__ == "__main__":
    main()
