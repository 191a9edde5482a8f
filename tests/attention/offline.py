"""Kernels compiled in place of a launch, for GPUs that are not there; not in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kvant.attention.triton import arguments
from kvant.cache import storage


class Driver:
    """As much of a driver as compiling asks for; `device` is one of the capabilities."""

    def __init__(self, *capabilities: int) -> None:
        self.capabilities, self.device = capabilities, 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capabilities[self.device], 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """A kernel whose launch compiles it, and hands over what was made."""

    def __init__(self, kernel: Any, found: Callable[[str, Any], None]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.found(self.kernel.__name__, self.kernel.warmup(*args, grid=grid, **options))

        return launch


def pretend(capable: Driver) -> None:
    """Pages on the CPU are what they would be on a GPU."""
    driver.set_active(capable)
    storage.select_tiles = lambda device: None  # type: ignore[attr-defined, assignment]
    on_a_gpu = arguments.get_dot_dtype  # in the interpreter a bfloat16 is another thing
    arguments.get_dot_dtype = lambda dtype, interpreted: on_a_gpu(dtype, False)
