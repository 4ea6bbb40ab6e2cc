"""The speed of a link, as Linux tells it."""

from pathlib import Path

import pytest

from icefloe.link import USUAL, link_speed

HEAD = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"


def machine(root: Path, speeds: dict[str, str | None], default: str) -> Path:
    """A machine with these interfaces; `default` has the default route."""
    (root / "proc/net").mkdir(parents=True)
    rows = [f"{name}\t000011AC\t00000000\t1\t0\t0\t0\t0000FFFF\t0\t0\t0\n" for name in speeds]
    rows.append(f"{default}\t00000000\t010011AC\t3\t0\t0\t0\t00000000\t0\t0\t0\n")
    (root / "proc/net/route").write_text(HEAD + "".join(rows))
    for name, speed in speeds.items():
        folder = root / "sys/class/net" / name
        folder.mkdir(parents=True)
        if speed is not None:
            (folder / "speed").write_text(speed)
    return root


def test_the_default_route_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, {"eth0": "25000\n", "docker0": "100000\n"}, "eth0")
    assert link_speed(root) == 25e9


@pytest.mark.parametrize("speed", ["-1\n", "", "0\n", None, "fast"])
def test_unknown(tmp_path: Path, speed: str | None) -> None:
    assert link_speed(machine(tmp_path, {"eth0": speed}, "eth0")) == USUAL


def test_no_route_and_no_proc(tmp_path: Path) -> None:
    assert link_speed(tmp_path) == USUAL
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text(HEAD + "eth0\n")
    assert link_speed(tmp_path) == USUAL


def test_this_machine() -> None:
    assert link_speed() > 0
