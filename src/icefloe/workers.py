"""How many threads the work on blocks gets."""

import os

# More would only wait for the interpreter and for each other.
_MOST = 16


def worker_count(wanted: int = 0) -> int:
    """`wanted`, 0 for one a core; 16 at most."""
    return min(wanted or os.cpu_count() or 1, _MOST)
