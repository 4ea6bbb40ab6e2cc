"""Where memory has moved to, against a model that knows every page."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from icefloe.capture.spaces import Space

PAGES = 48
EVERYWHERE = 96

places = st.integers(0, EVERYWHERE - 1)
lengths = st.integers(1, 20)


class Moving(RuleBasedStateMachine):
    """A space and its children; addresses are page numbers here."""

    @initialize(start=st.integers(0, EVERYWHERE - PAGES))
    def make(self, start: int) -> None:
        """Memory in one piece."""
        self.start = start
        whole = {page: page for page in range(start, start + PAGES)}
        self.spaces = [(Space(0, 0, bytearray(3), (start, start + PAGES)), whole)]

    @rule(which=st.integers(0, 9), start=places, length=lengths)
    def discard(self, which: int, start: int, length: int) -> None:
        """munmap, or madvise."""
        space, model = self.spaces[which % len(self.spaces)]
        space.discard(start, start + length)
        for page in range(start, start + length):
            model.pop(page, None)

    @rule(which=st.integers(0, 9), start=places, to=places, length=lengths)
    def move(self, which: int, start: int, to: int, length: int) -> None:
        """mremap, whose two ranges don't overlap."""
        if abs(start - to) < length:
            return
        space, model = self.spaces[which % len(self.spaces)]
        space.move(start, to, length)
        moved = {to + i: model.pop(start + i, None) for i in range(length)}
        for page, origin in moved.items():
            model.pop(page, None)
            if origin is not None:
                model[page] = origin

    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        """The child goes its own way."""
        if len(self.spaces) < 4:
            space, model = self.spaces[which % len(self.spaces)]
            space.done[which % 3] = 1
            child = space.child(9)
            assert child.done == space.done and child.done is not space.done
            self.spaces.append((child, dict(model)))

    @invariant()
    def agree(self) -> None:
        """Every address leads to its origin, every origin to its address, holes are empty."""
        for space, model in getattr(self, "spaces", []):
            found = {at: space.origin(at) for at in range(EVERYWHERE + 30)}
            assert {at: o for at, o in found.items() if o is not None} == model
            addresses = {origin: at for at, origin in model.items()}
            for origin in range(self.start, self.start + PAGES):
                piece = space.where(origin, origin + 1)
                wanted = addresses.get(origin)
                assert piece == (None if wanted is None else (origin, wanted, 1))
            self.check_walk(space, addresses)
            for at in range(EVERYWHERE):
                low, high, origin_at = space.surroundings(at)
                assert low <= at < high and origin_at == model.get(at)
                inside = [model.get(page) for page in range(low, min(high, EVERYWHERE + 30))]
                assert all((origin is None) == (origin_at is None) for origin in inside)

    def check_walk(self, space: Space, addresses: dict[int, int]) -> None:
        """Going through all origins piece by piece finds each page once."""
        origin, end = self.start, self.start + PAGES
        walked: dict[int, int] = {}
        while (piece := space.where(origin, end)) is not None:
            first, address, length = piece
            walked |= {first + i: address + i for i in range(length)}
            origin = first + length
            if origin >= end:
                break
        assert walked == addresses


TestMoving = Moving.TestCase
TestMoving.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
