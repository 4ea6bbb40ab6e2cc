"""How much time coding may take for how few bytes: `fast`, `balanced`, `small`, and `auto`."""

from dataclasses import dataclass
from typing import Literal

import zstandard

PolicyName = Literal["fast", "balanced", "small"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Trades time against stored bytes. Ratios are stored / raw bytes.

    `speed` (bytes a second and core) and `left` are what bench/coding.py measured on the mixed
    image of bench/images.py.
    """

    zstd: zstandard.ZstdCompressionParameters | None  # None: lz4 only
    worth: float  # a block whose sample shrinks to less than this is compressed
    speed: float
    left: float

    def compressor(self) -> zstandard.ZstdCompressor | None:
        """A compressor of its own for each thread."""
        return None if self.zstd is None else zstandard.ZstdCompressor(compression_params=self.zstd)


# The strategy of zstd's level 3 with the small tables of level 1: as fast as level 1 on memory,
# and 4 % smaller. The window takes the largest block.
_BALANCED = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_DFAST,
    min_match=6,
    hash_log=15,
    chain_log=14,
    search_log=1,
    target_length=0,
    window_log=20,
)

POLICIES: dict[PolicyName, Policy] = {
    "fast": Policy(None, worth=0.90, speed=1.3e9, left=0.65),
    "balanced": Policy(_BALANCED, worth=0.95, speed=0.58e9, left=0.42),
    "small": Policy(
        zstandard.ZstdCompressionParameters.from_level(6), worth=0.99, speed=0.20e9, left=0.42
    ),
}

# A policy that takes more of the processors has to save at least this share of the time.
_WORTH_IT = 0.02


def choose(link: float, cores: int) -> PolicyName:
    """The policy with which bytes are soonest at the other end of a link (bits a second).

    Blocks are coded on all cores while others are under way: the slower of the two counts.
    """
    took = {
        name: max(1 / (policy.speed * cores), 8 * policy.left / link)
        for name, policy in POLICIES.items()
    }
    enough = min(took.values()) * (1 + _WORTH_IT)
    return next(name for name in POLICIES if took[name] <= enough)
