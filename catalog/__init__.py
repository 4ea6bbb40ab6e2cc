"""The local catalog: where each block lies, how many images mention it, images and names.

`LocalStore` is a store opened by one process: lock, journal, packs and catalog together. The only
room that imports rocksdict.
"""

from icefloe.catalog.local import LocalStore, open_store
from icefloe.catalog.tables import DeadBlocks, ImageRow, PackRow

__all__ = ["DeadBlocks", "ImageRow", "LocalStore", "PackRow", "open_store"]
