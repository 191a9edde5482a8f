"""Kernels compiled instead of launched, for GPUs that this machine lacks; not in the
interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kvant.attention.triton import arguments
from kvant.cache import layout


class Driver:
    """The part of a GPU driver that compiling needs; `device` is one of the capabilities."""

    def __init__(self, *capabilities: int) -> None:
        self.capabilities, self.device = capabilities, 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capabilities[self.device], 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """A kernel whose launch compiles it and returns the compiled kernel."""

    def __init__(self, kernel: Any, on_compiled: Callable[[str, Any], None]) -> None:
        self.kernel, self.found = kernel, on_compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.found(self.kernel.__name__, self.kernel.warmup(*args, grid=grid, **options))

        return launch


def use_gpu_page_layout(capable: Driver) -> None:
    """Give CPU pages the layout they have on a GPU."""
    driver.set_active(capable)
    layout.select_tiles = lambda device: None  # type: ignore[attr-defined, assignment]
    on_a_gpu = arguments.get_dot_dtype  # the interpreter treats bfloat16 differently
    arguments.get_dot_dtype = lambda dtype, interpreted: on_a_gpu(dtype, False)
