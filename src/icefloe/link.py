"""How fast this machine's link to others is."""

import re
from pathlib import Path

# Where nothing says how fast it is, as on most virtual machines.
USUAL = 10e9


def link_speed(root: Path = Path("/")) -> float:
    """Bits a second of the link that the default route takes, USUAL if nobody knows.

    /proc/net/route (route(8)) and /sys/class/net/*/speed (Mbit/s, -1 or an error if unknown;
    Documentation/ABI/testing/sysfs-class-net).
    """
    try:
        routes = (root / "proc/net/route").read_text().splitlines()[1:]
        default = [words[0] for words in map(str.split, routes) if words[1] == "0" * 8]
        speeds = [(root / "sys/class/net" / name / "speed").read_text() for name in default]
    except (OSError, IndexError):
        return USUAL
    known = [int(speed) for speed in speeds if re.fullmatch(r"\d+\s*", speed)]
    return max(known, default=0) * 1e6 or USUAL
