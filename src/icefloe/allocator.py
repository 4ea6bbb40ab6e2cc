"""Tells glibc's allocator what is about to come (mallopt(3), malloc_trim(3)).

Other C libraries have neither function and are left alone.
"""

import ctypes

# mallopt's parameters, and their values in bytes.
_M_TRIM_THRESHOLD, _TRIM_BYTES = -1, 256 << 20
_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 32 << 20


def keep_freed() -> None:
    """From now on, freed memory is used again instead of being handed back to the kernel.

    Blocks come and go by the thousand; fetching each one's pages anew costs a seventh of `add`.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def give_back() -> None:
    """Hands freed memory to the kernel now: what comes next needs its own."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
