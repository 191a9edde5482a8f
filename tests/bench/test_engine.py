"""Test the methods that the benchmark of engines compares."""

from __future__ import annotations

from typing import Any

from hf.zoo import build
from kvant.bench.engine import make_methods


class RecordingModel:
    """Records the options of `generate_batch`."""

    def generate_batch(self, prompts: list[list[int]], **options: Any) -> None:
        self.options = options


def test_continuous_batching_allocates_what_its_prompts_need() -> None:
    """Regression: it allocated most of the memory of the machine."""
    model, prompts = RecordingModel(), [[3] * 300 for _ in range(2)]
    *_, continuous, _ = make_methods(build("llama"), prompts, "raw", 20)
    assert continuous.name == "continuous batching"
    continuous._run_method(model, prompts)
    memory = model.options["continuous_batching_config"]
    assert memory.num_blocks == 2 * 2 * 2  # twice the 2 pages of 256 that each prompt needs
