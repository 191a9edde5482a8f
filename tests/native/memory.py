"""Memory of an exact size: accesses beyond its end are detected."""

from __future__ import annotations

import ctypes
import mmap
import os

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.malloc.restype = LIBC.mmap.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
ROOM = 1 << 24  # bytes, at most
CANARY = b"\xa5" * 64


class Guarded:
    """Memory that ends at an inaccessible page, after canary bytes that must not change."""

    def __init__(self) -> None:
        self._all: list[int] = []
        self._taken = 0

    def take(self, content: bytes) -> int:
        if self._taken == len(self._all):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            begin = LIBC.mmap(
                None, ROOM + mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0
            )
            assert LIBC.mprotect(begin + ROOM, mmap.PAGESIZE, 0) == 0
            self._all.append(begin + ROOM)
        end = self._all[self._taken]
        self._taken += 1
        address = end - len(content)
        ctypes.memmove(address - len(CANARY), CANARY + content, len(CANARY) + len(content))
        return address

    def intact(self, address: int) -> bool:
        return ctypes.string_at(address - len(CANARY), len(CANARY)) == CANARY

    def free(self) -> None:
        self._taken = 0


class Allocated:
    """Memory from malloc: AddressSanitizer, if loaded, watches both ends."""

    def __init__(self) -> None:
        self._all: list[int] = []

    def take(self, content: bytes) -> int:
        self._all.append(LIBC.malloc(len(content)))
        ctypes.memmove(self._all[-1], content, len(content))
        return self._all[-1]

    def intact(self, address: int) -> bool:
        return True

    def free(self) -> None:
        for address in self._all:
            LIBC.free(address)
        self._all.clear()


def make_memory() -> Guarded | Allocated:
    return Allocated() if "asan" in os.environ.get("LD_PRELOAD", "") else Guarded()
