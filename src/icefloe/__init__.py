"""icefloe stores and moves checkpoints of GPU workloads.

The rooms (`icefloe.chunker`, `icefloe.store`, ...) are the packages at the top level of the
repository, linked in here. Imports point one way: see `[tool.importlinter]` in pyproject.toml.
"""

__version__ = "0.1.0"
