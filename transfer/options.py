"""How to reach remotes: values that cost nothing to import."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Addressing = Literal["auto", "path", "virtual"]


@dataclass(frozen=True, slots=True)
class S3Options:
    """What AWS's own variables and files don't say.

    `addressing`: whether the bucket stands in the path or in the name of the host.
    """

    endpoint: str | None = None
    region: str | None = None
    addressing: Addressing = "auto"


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """`patience`: seconds that a request may go on failing.

    `requests`: how many are under way at a time. `keys`: a file of keys; None: no encryption.
    """

    s3: S3Options = field(default_factory=S3Options)
    patience: float = 120.0
    requests: int = 16
    keys: Path | None = None
