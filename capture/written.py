"""What one `criu dump` writes, as windows: through its streams, then what lies in its folder.

Even when it streams, some files are written to the image directory: those of plugins, such as
amdgpu's. Without streaming all are, before the first window.
"""

from collections.abc import Callable, Sequence

from icefloe.capture.dump import Dump
from icefloe.capture.incoming import SOCKET, Incoming
from icefloe.capture.tree import Tree
from icefloe.capture.windows import Buffer, CheckpointWindows, Group, Window
from icefloe.store.manifest import ImageFile


class Written:
    """See Windows. `all_read` is called once, when CRIU waits and its streams have been read."""

    def __init__(
        self, dump: Dump, stream: bool, pages: Sequence[str], all_read: Callable[[], None]
    ) -> None:
        """Listens for CRIU if it is to `stream`. Raises CriuFailed."""
        self.entries: list[ImageFile] = []
        self._dump = dump
        self._pages = pages
        self._all_read = all_read
        self._incoming = Incoming(dump.images, pages, self.entries) if stream else None
        self._stopped = False
        self._tree: Tree | None = None
        self._rest: CheckpointWindows | None = None

    def start(self) -> None:
        """CRIU has been started."""
        if self._incoming is not None:
            self._incoming.start(self._dump.held, self._dump.pidfd, self._all_read)

    def take(self, buffer: Buffer) -> Window | Group | None:
        """See Windows. Raises CriuFailed, SourceUnreadable or SourceChanged."""
        if self._rest is None:
            sequence = 0
            if self._incoming is None:
                self._dump.wait_held(lambda: self._stopped)
                self._all_read()
            elif (piece := self._incoming.take(buffer)) is not None:
                return piece
            else:
                sequence = self._incoming.sequence
            self._tree = Tree(self._dump.images, without={SOCKET})
            self._rest = CheckpointWindows(self._tree, self.entries, self._pages, sequence)
        return self._rest.take(buffer)

    def stop(self) -> None:
        """See Windows."""
        self._stopped = True
        if self._incoming is not None:
            self._incoming.stop()

    def verify(self) -> None:
        """After the last window. Raises SourceChanged."""
        if self._tree is not None:
            self._tree.verify()

    def close(self) -> None:
        """Lets go of the streams; a CRIU that still writes to them fails."""
        if self._incoming is not None:
            self._incoming.close()
