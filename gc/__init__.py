"""What may be deleted, deleting it, auditing what is there, and what it all costs."""

from icefloe.gc.audit import Audit, Problem, check
from icefloe.gc.capacity import compare, describe, summarise
from icefloe.gc.removal import Removal, remove
from icefloe.gc.sweep import GcOptions, GcResult, collect

__all__ = [
    "Audit",
    "GcOptions",
    "GcResult",
    "Problem",
    "Removal",
    "check",
    "collect",
    "compare",
    "describe",
    "remove",
    "summarise",
]
