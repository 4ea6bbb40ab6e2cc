"""`rm`: takes names away, and images that have none left."""

from collections.abc import Sequence
from dataclasses import dataclass

from icefloe.catalog import LocalStore
from icefloe.ids import BlockId, IdPrefix, Name


@dataclass(frozen=True, slots=True)
class Removal:
    """What `rm` did. `freed_bytes` is what the next `gc` can give back because of it."""

    names: tuple[str, ...]
    images: tuple[BlockId, ...]
    freed_bytes: int


def remove(store: LocalStore, references: Sequence[Name | IdPrefix]) -> Removal:
    """Removes all of these or, when one can't be found, none.

    A name goes; its image goes with its last name. An id takes the image and all its names.
    Raises ImageNotFound.
    """
    names = store.catalog.names()
    gone: set[str] = set()
    images: dict[BlockId, None] = {}
    for reference in references:
        image = store.catalog.resolve(reference)
        images[image] = None
        if isinstance(reference, Name):
            gone.add(str(reference))
        else:
            gone.update(name for name, target in names.items() if target == image)
    kept = {image for name, image in names.items() if name not in gone}
    leaving = tuple(image for image in images if image not in kept)
    before = int(store.catalog.dead_blocks().stored.sum())
    store.commit("rm", images_removed=leaving, names=dict.fromkeys(sorted(gone)))
    after = int(store.catalog.dead_blocks().stored.sum())
    return Removal(tuple(sorted(gone)), leaving, after - before)
