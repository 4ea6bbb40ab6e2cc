"""Whether this machine fits an image, asked before anything of it is moved.

The pure comparison is `fit`; here this machine is looked at, as far as the image needs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from icefloe.capture import fit
from icefloe.capture.criu import Criu
from icefloe.capture.cuda import Cuda, Moves, OpenCuda
from icefloe.capture.facts import CudaFacts, decode_cuda, machine_facts
from icefloe.capture.fit import Mismatch
from icefloe.errors import CudaFailed
from icefloe.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Verdict:
    """What differs, and the way to CUDA, if the image needs it and there is one.

    `moves`: which GPU takes the place of which, if others do.
    """

    mismatches: tuple[Mismatch, ...]
    cuda: Cuda | None
    moves: Moves

    @property
    def fits(self) -> bool:
        """Nothing blocks."""
        return all(mismatch.severity != "blocks" for mismatch in self.mismatches)


def judge(
    manifest: Manifest, program: Criu, expected: Mapping[str, str], open_cuda: OpenCuda
) -> Verdict:
    """Compares. `expected` labels are what this machine would run."""
    cuda, here, reason = None, None, None
    if "cuda" in manifest.facts:
        try:
            cuda = open_cuda()
            here = cuda.facts()
        except CudaFailed as error:
            cuda, reason = None, error.happened
    found = fit.mismatches(
        manifest.facts,
        manifest.labels,
        machine_facts(program.version, here),
        expected,
        bool(cuda_pids(manifest)),
        reason,
    )
    return Verdict(found, cuda, _moves(decode_cuda(manifest.facts), here))


def _moves(then: CudaFacts | None, now: CudaFacts | None) -> Moves:
    """GPU by GPU, in order. All of them, or none when they are where they were."""
    if then is None or now is None:
        return ()
    pairs = [(a.uuid, b.uuid) for a, b in zip(then.gpus, now.gpus, strict=False)]
    known = all(old and new for old, new in pairs)
    return pairs if known and any(old != new for old, new in pairs) else ()


def cuda_pids(manifest: Manifest) -> list[int]:
    """The processes whose CUDA the capture suspended, by the pids that they see themselves."""
    cuda = manifest.facts.get("cuda")
    pids = cuda.get("pids") if isinstance(cuda, Mapping) else None
    return [pid for pid in pids if type(pid) is int] if isinstance(pids, list) else []
