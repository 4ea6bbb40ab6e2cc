"""Every error that a user can meet, one class per condition.

Each carries what it names as data, says what happened and what to do, and knows the exit code
of the command that meets it. `icefloe --help` prints EXIT_CODES.
"""

from collections.abc import Sequence
from pathlib import Path

EXIT_CODES = {
    0: "done",
    1: "unexpected (a bug)",
    2: "usage",
    3: "not found or not readable",
    4: "corrupt or failed verification",
    5: "incompatible machine",
    6: "store busy",
    7: "remote or peer unreachable",
    8: "no space, not writable, or a limit reached",
    9: "CRIU or CUDA failed",
}


class IcefloeError(Exception):
    """Base of all errors with a message for people: `what happened: what to do`."""

    exit_code = 1

    def __init__(self, happened: str, advice: str) -> None:
        super().__init__(f"{happened}: {advice}")
        self.happened = happened
        self.advice = advice


class UsageError(IcefloeError):
    """An argument that can't mean anything."""

    exit_code = 2


class ImageNotFound(IcefloeError, LookupError):
    """No committed image answers to a name or an id."""

    exit_code = 3

    def __init__(self, reference: str) -> None:
        super().__init__(f"no image {reference} in this store", "`icefloe ls` lists the images")
        self.reference = reference


class SourceUnreadable(IcefloeError, OSError):
    """A file of the checkpoint that is to be stored can't be read."""

    exit_code = 3

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(
            f"cannot read {path} ({reason})",
            "nothing was stored; name a checkpoint that this user can read",
        )
        self.path = Path(path)


class SourceChanged(IcefloeError):
    """A file changed, shrank or vanished while it was being read."""

    exit_code = 4

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(
            f"{path} changed while it was being read ({reason})",
            "nothing was stored; wait until the dump is finished and run the command again",
        )
        self.path = Path(path)


class BadSource(IcefloeError):
    """A directory or archive that can't be stored as a checkpoint."""

    exit_code = 4


class Corrupt(IcefloeError):
    """Stored bytes that aren't what was written."""

    exit_code = 4


class CorruptBlock(Corrupt):
    """A block whose bytes don't hash to its id. `pack` is a path, `offset` a byte position."""

    def __init__(self, pack: Path, offset: int, expected: bytes, found: str) -> None:
        super().__init__(
            f"block {expected.hex()} in {pack} at byte {offset} is corrupt ({found})",
            "run `icefloe check --read-data` to see what else is; fetch the image again from "
            "another copy",
        )
        self.pack = pack
        self.offset = offset
        self.expected = expected
        self.found = found


class CorruptPack(Corrupt):
    """A pack whose frame (header, index or trailer) is damaged."""

    def __init__(self, pack: Path, reason: str) -> None:
        super().__init__(
            f"pack {pack} is damaged ({reason})",
            "run `icefloe check --read-data` to see which images it holds; fetch them again from "
            "another copy",
        )
        self.pack = pack


class MissingPack(Corrupt):
    """A pack that the catalog names and the disk lacks."""

    def __init__(self, pack: Path) -> None:
        super().__init__(
            f"pack {pack} is missing",
            "put the file back, or fetch the images that need it again from another copy",
        )
        self.pack = pack


class CorruptManifest(Corrupt):
    """Bytes that are no canonical manifest."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"not a valid manifest ({reason})", "fetch the image again from another copy"
        )
        self.reason = reason


class CorruptJournal(Corrupt):
    """The journal lacks or garbles what the catalog has already applied."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"journal {path} is damaged ({reason})",
            "`icefloe check --repair` writes it anew from the catalog",
        )
        self.path = path


class CorruptCatalog(Corrupt):
    """The local catalog can't be read; it can be rebuilt from packs and journal."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"catalog {path} is damaged ({reason})",
            f"move {path} away; the next command rebuilds it from the packs and the journal",
        )
        self.path = path


class UnknownFormat(Corrupt):
    """Written by a version that this one doesn't know."""

    def __init__(self, what: str | Path, version: int, known: int) -> None:
        super().__init__(
            f"{what} has format version {version}, this icefloe knows up to {known}",
            "use a newer icefloe",
        )
        self.version = version
        self.known = known


class BadImage(Corrupt):
    """A file of a checkpoint that CRIU's formats don't explain."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"{path} of the checkpoint can't be used ({reason})",
            "`icefloe export` gives back its files as they were stored; see whether CRIU itself "
            "restores them",
        )
        self.path = path
        self.reason = reason


class CriuFailed(IcefloeError):
    """CRIU is missing, too old, not permitted to work, or gave up. What it began is undone."""

    exit_code = 9


class Incompatible(IcefloeError):
    """This machine can't run what an image holds. `sentences` say why not, one difference each."""

    exit_code = 5

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__(
            f"this machine doesn't fit the image ({'; '.join(sentences)})",
            "start the work anew here, restore it on a machine like the one it was captured on, "
            "or try with --ignore-incompatible",
        )
        self.sentences = tuple(sentences)


class CudaFailed(IcefloeError):
    """CUDA is missing, too old, or can't suspend or wake a process."""

    exit_code = 9


class NoProcess(IcefloeError, LookupError):
    """There is no process of this pid."""

    exit_code = 3

    def __init__(self, pid: int) -> None:
        super().__init__(f"there is no process {pid}", "see with `ps` which there are")
        self.pid = pid


class CaptureAborted(IcefloeError):
    """A capture that failed when the processes were frozen already; `outcome` is how it ended."""

    exit_code = 9  # or that of its cause

    def __init__(self, cause: IcefloeError, outcome: str) -> None:
        super().__init__(f"{cause.happened}; {outcome}", cause.advice)
        self.exit_code = cause.exit_code
        self.cause = cause


class RestoreAborted(IcefloeError):
    """A restore that failed when its process may have run already: the process was killed."""

    exit_code = 9  # or that of its cause

    def __init__(self, cause: IcefloeError) -> None:
        super().__init__(f"{cause.happened}; what had been restored was killed", cause.advice)
        self.exit_code = cause.exit_code
        self.cause = cause


class ExportExists(IcefloeError, FileExistsError):
    """The place to export to is taken."""

    exit_code = 2

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} exists and is not an empty folder", "name a folder that is free")
        self.path = path


class StoreBusy(IcefloeError):
    """Another process holds the store."""

    exit_code = 6

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(
            f"store {path} is in use by {holder}", "wait until it has finished, then try again"
        )
        self.path = path
        self.holder = holder


class StoreNotFound(IcefloeError, LookupError):
    """The folder holds no store, and the command would only read."""

    exit_code = 3

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"no store in {path}",
            "the first `icefloe add` makes one; or name another with --store or ICEFLOE_STORE",
        )
        self.path = path


class NoSpace(IcefloeError, OSError):
    """The disk or a quota is full, or a file got too large for its file system."""

    exit_code = 8

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(
            f"cannot write {path} ({reason})", "free some space there and run the command again"
        )
        self.path = Path(path)


class NotWritable(IcefloeError, OSError):
    """A folder or file system refuses writes: no permission, read-only, no folder, I/O error."""

    exit_code = 8

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(
            f"cannot write {path} ({reason})",
            "make it a folder that this user can write to, or name another one",
        )
        self.path = Path(path)


class RemoteUnreachable(IcefloeError, OSError):
    """A request to a remote or peer failed for longer than patience lasts."""

    exit_code = 7

    def __init__(self, request: str, reason: str) -> None:
        super().__init__(
            f"{request} failed ({reason})",
            "see whether the remote is up and reachable from here, then run the command again: "
            "it goes on where it stopped",
        )
        self.request = request
        self.reason = reason


class RemoteRefused(IcefloeError, OSError):
    """A remote that answers and says no: credentials, permissions, no such bucket."""

    exit_code = 7

    def __init__(self, request: str, reason: str) -> None:
        super().__init__(
            f"{request} was refused ({reason})",
            "check the address, the credentials and what they permit, then run the command again: "
            "it goes on where it stopped",
        )
        self.request = request
        self.reason = reason


class RemoteNotFound(IcefloeError, LookupError):
    """Nobody has pushed anything there."""

    exit_code = 3

    def __init__(self, url: str) -> None:
        super().__init__(
            f"there is no remote at {url}", "check the address; the first `icefloe push` makes one"
        )
        self.url = url


class NotInRemote(IcefloeError, LookupError):
    """No image of a remote answers to a name or an id."""

    exit_code = 3

    def __init__(self, reference: str, url: str) -> None:
        super().__init__(
            f"no image {reference} in {url}", f"`icefloe remote ls {url}` lists the images there"
        )
        self.reference = reference
        self.url = url


class RemoteBusy(IcefloeError):
    """Somebody else collects there, or changes the same name again and again."""

    exit_code = 6

    def __init__(self, url: str, holder: str) -> None:
        super().__init__(
            f"{url} is in use by {holder}", "wait until it has finished, then try again"
        )
        self.url = url
        self.holder = holder


class CorruptObject(Corrupt):
    """An object of a remote whose bytes aren't what was written."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            f"{where} is corrupt ({reason})",
            "`icefloe remote check --read-data` shows what else is; push the image again from a "
            "store that has it",
        )
        self.where = where
        self.reason = reason


class KeyNeeded(IcefloeError):
    """A remote is encrypted, or isn't, and the key given doesn't fit that."""

    exit_code = 2


class LimitReached(IcefloeError):
    """A limit of a format (see docs/format.md) or of the machine would be passed."""

    exit_code = 8
