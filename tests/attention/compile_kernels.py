"""Compile the Triton kernels for two GPU models, without a GPU, and print their properties as JSON.

Run it as a program: Triton's interpreter must be off. Views are built on the CPU, and each launch
compiles the kernel instead.
"""

import json
import re
from typing import Any

import torch
from offline import Compiled, Driver, use_gpu_page_layout

from kvant import Cache
from kvant.attention.triton import TritonBackend, kernel_launch, store_pages
from kvant.attention.triton.arguments import StaticTritonPageTable
from kvant.attention.triton.kernel_launch import KernelView
from kvant.attention.triton.kernels import attend, store
from kvant.cache.tokens import plan_tokens
from kvant.codecs.frames import hadamard
from kvant.codecs.frames import rotation_kernel as turning
from kvant.contracts import AttentionRequest
from kvant.pages.advance import advance
from kvant.replay.steps import TritonDecodeStep

kernels: dict[str, dict[str, int]] = {}


PATTERNS = {
    "tensor cores": r"\b(mma\.sync|wgmma\.mma_async)",
    "16 bytes": r"cp\.async\.cg\.shared\.global[^;]*0x10\b|ld\.global[.\w]*\.v4\.b32",
    "fused": r"\bfma\.",
    "products": r"\bmul\.rn\.f32\b",
    "division": r"\bdiv\.rn\.f32\b",
    "approximate": r"\b(div\.full|div\.approx|rcp\.approx|sqrt\.approx)",
}


def keep(name: str, kernel: Any) -> None:
    ptx = kernel.asm["ptx"]
    facts = {name: len(re.findall(pattern, ptx)) for name, pattern in PATTERNS.items()}
    facts["shared"] = kernel.metadata.shared
    facts["kernel"] = int(kernel.hash[:12], 16)  # identifies the kernel
    kernels[f"{name} {label}"] = facts


label = ""
active = Driver(90, 86)  # a Hopper and a small Ampere GPU
use_gpu_page_layout(active)
for module, *names in (
    (attend, "attend"),
    (attend, "merge"),
    (store, "seal", "put", "put_token"),
):
    for name in names:
        setattr(module, name, Compiled(getattr(module, name), keep))
turning.rotate = Compiled(turning.rotate, keep)

for text, dim, queries in (
    ("raw", 128, 1),
    ("affine8v4", 256, 64),
    ("turbo4/turbo3", 128, 1),
    ("turbo2,window=99,sinks=0", 128, 4),
):
    label = f"{text} {dim} {queries}"
    view = Cache(1, f"{text},tail=0")[0].append(*torch.randn(2, 1, 2, 300, dim).bfloat16())
    q = torch.randn(1, 8, queries, dim).to(torch.float32 if "turbo" in text else torch.bfloat16)
    kernel_launch.launch_attention(
        AttentionRequest(q, 0.1, view.mask, output_dtype=torch.bfloat16), KernelView.from_view(view)
    )
label = "chosen"
state = Cache(1, "affine4,tail=0,select=2:0")[0]
state.append(*torch.randn(2, 1, 2, 600, 128).bfloat16())
request = AttentionRequest(torch.randn(1, 8, 1, 128).bfloat16(), 0.1, state.view().mask)
chosen = TritonBackend("interpreted", "cpu").select_pages(request, state.view())
assert chosen is not None
kernel_launch.launch_attention(request, KernelView.from_view(state.view(), chosen))
for count in (1000, 1024, 1088):  # tables of 15, 16 and 17 pages: one is a multiple of 16
    label = f"tables {count}"
    state = Cache(1, "affine8,tail=0,prefill=stored,capacity=2048")[0]
    view = state.append(*torch.randn(2, 2, 2, count, 64))
    kernel_launch.launch_attention(
        AttentionRequest(torch.randn(2, 2, 1, 64), 0.1, view.mask), KernelView.from_view(view)
    )
TritonBackend.supports = lambda self, pages, request=None: None  # type: ignore
for text in ("raw,window=99,sinks=0", "affine4/turbo3"):
    label = f"step {text}"
    cache = Cache(1, f"{text},tail=0,capacity=640")
    keys, values = torch.randn(2, 1, 2, 301, 128).bfloat16()
    cache[0].append(keys[:, :, :300], values[:, :, :300])
    (change,) = plan_tokens(cache)
    place = StaticTritonPageTable(change, torch.device("cpu"))
    step = TritonDecodeStep.from_view(cache[0].make_view(change), place)
    step(torch.randn(1, 8, 1, 128).bfloat16(), keys[:, :, 300:], values[:, :, 300:])
active.device, kernel_launch.get_available_shared_bytes = 1, lambda device: 99 << 10  # type: ignore
for text in ("raw", "turbo4"):
    label = f"small {text}"
    view = Cache(1, f"{text},tail=0")[0].append(*torch.randn(2, 1, 2, 300, 256).bfloat16())
    kernel_launch.launch_attention(
        AttentionRequest(torch.randn(1, 8, 64, 256), 0.1, view.mask, softcap=9.0),
        KernelView.from_view(view),
    )
active.device = 0
for text, dim in (
    ("affine8", 128),
    ("affine4/affine4,group=128", 80),
    ("affine4,group=16", 128),
    ("turbo3/raw", 128),
):
    label = f"{text} {dim}"
    cache = Cache(1, f"{text},tail=0")
    keys, values = torch.randn(2, 1, 2, 68, dim).bfloat16()
    cache[0].append(keys[:, :, :4], values[:, :, :4])
    layer, rows = cache[0], {"keys": keys[:, :, 4:], "values": values[:, :, 4:]}
    store_pages.launch_store(
        advance(layer.page_table, 64, cache.state.pools[0].copy()), rows, layer.storage.sides
    )
for last in (False, True):
    label = f"last={last}"
    x = torch.randn(1, 8, 1, 128).bfloat16()
    hadamard.launch_rotation(x, lambda x: torch.ones(128), torch.float32, signs_last=last)
print(json.dumps(kernels))
