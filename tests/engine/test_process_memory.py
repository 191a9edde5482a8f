"""Test the byte limit against the memory of the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="no mark to set back"
)

SCRIPT = """
import ctypes, json
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvant
from generation.speakers import Numbers
from kvant.bench.harness import read_resident_nbytes, reset_resident_peak

torch.set_num_threads(1)
PROMPT, NEW = 600, 4
config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=8, head_dim=128,
)
model = LlamaForCausalLM(config).eval()
four = 4 * kvant.plan(model, "raw", context=PROMPT + NEW).nbytes

def serve(count, new):
    with kvant.Engine(model, Numbers(), "raw", max_bytes=four) as engine:
        streams = [
            engine.submit([3 + i] * PROMPT, max_new_tokens=new, ignore_end=True)
            for i in range(count)
        ]
        num_tokens = sum(len(stream.result().tokens) for stream in streams)
        return num_tokens, engine.stats()

def peak(count):
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_resident_peak()
    num_tokens, stats = serve(count, NEW)
    return read_resident_nbytes("VmHWM") - before, num_tokens, stats["finished"]

serve(1, 1)  # permanent allocations of first calls
one, _, _ = peak(1)  # its pages, and the activations of a prompt
many, num_tokens, finished = peak(40)
report = {"four": four, "one": one, "peak": many, "num_tokens": num_tokens, "finished": finished}
print(json.dumps(report))
"""
KEPT = 4 << 20  # retained by the allocator
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # lets it return larger blocks


def test_forty_requests_need_the_memory_of_four() -> None:
    tests = Path(__file__).resolve().parent.parent
    run = [sys.executable, "-c", SCRIPT]
    process = subprocess.run(
        run, capture_output=True, text=True, check=True, cwd=tests, env=os.environ | AT_ONCE
    )
    report = json.loads(process.stdout)
    assert (report["num_tokens"], report["finished"]) == (160, 40)
    grows = report["four"] // 8  # keys or values of one of four layers: old and new pages
    limit = 0.75 * report["four"] + report["one"] + grows + KEPT
    assert 0.5 * report["four"] < report["peak"] <= limit, report
