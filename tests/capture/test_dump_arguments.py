"""What may be handed on to CRIU: judged by getopt_long(3) itself, with CRIU's own tables.

An option that slips through would send the memory elsewhere, let the processes run on behind an
image that is taken for their last state, or dump another process.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from icefloe.capture.dump import argument_of, check_arguments, check_defaults
from icefloe.errors import UsageError

# criu/config.c of CRIU 4.2.
SHORT = "dSsRt:hD:o:v::x::Vr:jJ:lW:L:M:"
NONE, REQUIRED, OPTIONAL = 0, 1, 2
SWITCHES = (
    "restore-detached restore-sibling daemon tcp-established log-pid evasive-devices link-remap "
    "shell-job file-locks page-server track-mem auto-dedup force-irmap extra experimental "
    "skip-in-flight deprecated display-stats weak-sysctls tcp-close stream tls "
    "skip-file-rwx-check mntns-compat-mode unprivileged ghost-fiemap allow-uprobes"
).split()
VALUES = (
    "tree images-dir work-dir log-file join-ns root close pidfile veth-pair action-script address "
    "port prev-images-dir libdir ext-mount-map cgroup-root inherit-fd feature skip-mnt enable-fs "
    "freeze-cgroup ghost-limit irmap-scan-path lsm-profile timeout external empty-ns cgroup-props "
    "cgroup-props-file cgroup-dump-controller status-fd ps-socket config tls-cacert tls-cacrl "
    "tls-cert tls-key cgroup-yard pre-dump-mode file-validation lsm-mount-context network-lock"
).split()
PLAIN = (
    "leave-stopped leave-running help version ms exec-cmd enable-external-sharing "
    "enable-external-masters lazy-pages all no-default-config tls-no-cn-verify"
).split()
LONG = {
    **{name: NONE for switch in SWITCHES for name in (switch, f"no-{switch}")},
    **dict.fromkeys(PLAIN, NONE),
    **dict.fromkeys(VALUES, REQUIRED),
    **dict.fromkeys(("ext-unix-sk", "cpu-cap", "manage-cgroups", "verbosity"), OPTIONAL),
}
SAME = {
    "tree": "t",
    "leave-stopped": "s",
    "leave-running": "R",
    "images-dir": "D",
    "work-dir": "W",
    "log-file": "o",
    "join-ns": "J",
    "root": "r",
    "ext-unix-sk": "x",
    "help": "h",
    "version": "V",
    "libdir": "L",
    "ext-mount-map": "M",
    "verbosity": "v",
}

REFUSED = {
    *("t", "D", "W", "o", "s", "R", "stream", "page-server", "address", "port", "ps-socket"),
    *("lazy-pages", "prev-images-dir", "no-stream", "config"),
}
REFUSED_STREAMING = {*REFUSED, "auto-dedup"}


class Option(ctypes.Structure):
    """struct option."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("has_arg", ctypes.c_int),
        ("flag", ctypes.c_void_p),
        ("val", ctypes.c_int),
    ]


NAMES = list(LONG)
TABLE = (Option * (len(NAMES) + 1))(
    *(
        Option(name.encode(), LONG[name], None, ord(SAME[name]) if name in SAME else 1000 + i)
        for i, name in enumerate(NAMES)
    )
)
libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Given:
    """What CRIU makes of its arguments. Bad ones, for which it ends at once, are `wrong`."""

    options: list[tuple[str, str | None]]
    wrong: bool


def parsed(arguments: Sequence[str]) -> Given:
    """By the C library, behind those that icefloe gives."""
    words = ["criu", "dump", "--tree=1", *arguments]
    array = (ctypes.c_char_p * (len(words) + 1))(*(word.encode() for word in words))
    ctypes.c_int.in_dll(libc, "optind").value = 0
    ctypes.c_int.in_dll(libc, "opterr").value = 0
    options, wrong = [], False
    while (value := libc.getopt_long(len(words), array, SHORT.encode(), TABLE, None)) != -1:
        if value == ord("?"):
            wrong = True
            continue
        name = NAMES[value - 1000] if value >= 1000 else chr(value)
        told = ctypes.c_char_p.in_dll(libc, "optarg").value
        options.append((name, None if told is None else told.decode()))
    assert options.pop(0) == ("t", "1")
    rest = len(words) - ctypes.c_int.in_dll(libc, "optind").value
    return Given(options, wrong or rest > 1)


def refused(arguments: Sequence[str], stream: bool = True) -> bool:
    """Whether icefloe takes them."""
    try:
        check_arguments(arguments, stream)
    except UsageError:
        return True
    return False


def prefixes() -> Iterator[tuple[str, str]]:
    """Every beginning of every long option that means that option, and its name."""
    for name in NAMES:
        for end in range(1, len(name) + 1):
            given_ = parsed([f"--{name[:end]}", "value"][: 1 + (LONG[name] == REQUIRED)])
            if not given_.wrong and [each[0] for each in given_.options] == [SAME.get(name, name)]:
                yield f"--{name[:end]}", SAME.get(name, name)


PREFIXES = list(prefixes())


def test_the_oracle() -> None:
    """It reads as CRIU does."""
    five = [("j", None), ("R", None), ("v", "4"), ("port", "5")]
    assert parsed(["-jR", "-v4", "--po=5"]) == Given(five, False)
    assert parsed(["-jR", "-v4", "--tc", "--po=5"]) == Given(five, True)  # -established, or -close
    assert parsed(["-jR", "--pag", "--port", "-R"]).options == [
        ("j", None),
        ("R", None),
        ("page-server", None),
        ("port", "-R"),
    ]
    assert parsed(["--", "-R"]) == Given([], True)
    assert dict(PREFIXES)["--pa"] == "page-server" and "--p" not in dict(PREFIXES)


@pytest.mark.parametrize("stream", [True, False])
def test_every_spelling_of_a_long_option(stream: bool) -> None:
    """Each beginning that CRIU understands is refused, and no option that goes is."""
    wrong = REFUSED_STREAMING if stream else REFUSED
    for spelling, name in PREFIXES:
        for words in ([spelling], [f"{spelling}=x"], [spelling, "x"], ["-j", spelling, "-v4"]):
            assert refused(words, stream) == (name in wrong), words


@pytest.mark.parametrize(
    "words",
    [
        "-t 5",
        "-t5",
        "-D /x",
        "-D/x",
        "-W/x",
        "-o x",
        "-ox",
        "-s",
        "-R",
        "-Rv4",
        "-sj",
        "-jR",
        "-js",
        "-ljR",
        "-jt5",
        "-jt 5",
        "-jlD/x",
        "-lW/x",
        "-jo x",
        "-dSR",
        "-SdlVjR",
        "--tree 5",
        "--tree=5",
        "--page-server",
        "--page-server=1",
        "--shell-job --page-server",
        "--shell-job -v4 -jR --tcp-established",
        "-v -R",
        "-x -R",
        "--verbosity -R",
        "--cpu-cap -R",
    ],
)
def test_options_that_are_refused(words: str) -> None:
    assert {name for name, _ in parsed(words.split()).options} & REFUSED or "=1" in words
    with pytest.raises(UsageError, match="can't be given to CRIU"):
        check_arguments(words.split(), stream=True)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--tcp-established",
        "--tcp-est",
        "--shell-job",
        "-j",
        "-jl",
        "-v4",
        "-vvvv",
        "-vR",
        "-jv4",
        "-xR",
        "--verbosity=4",
        "--external mnt[x]:y",
        "--external=mnt[/s]:tree",
        "--freeze-cgroup /x",
        "--freeze-cgroup=/sys/fs/cgroup/stream",
        "--file-locks --link-remap --ghost-limit 64M",
        "--manage-cgroups=soft",
        "-L /usr/lib/criu",
        "-L/usr/lib/stream",
        "-lL/Ds",
        "--action-script ./tree.sh",
        "-r /sRt",
        "-rsRt",
        "--skip-mnt /port",
        "--network-lock skip",
        "--timeout 100",
    ],
)
def test_options_that_are_handed_on(words: str) -> None:
    assert not parsed(words.split()).wrong
    check_arguments(words.split(), stream=True)
    check_arguments(words.split(), stream=False)


@pytest.mark.parametrize(
    "words",
    [
        "-r -- -R",
        "--external -- --page-server",
        "--external -r -R",
        "--root -t -R",
        "--skip-mnt -L --leave-running",
        "-jL -- --stream",
        "-L -L -R",
        "--exter -M --lazy-pages",
    ],
)
def test_values_that_look_like_options(words: str) -> None:
    """Whoever is led to take a value for an option, skips what is an option."""
    assert {name for name, _ in parsed(words.split()).options} & REFUSED
    with pytest.raises(UsageError):
        check_arguments(words.split(), stream=True)


@pytest.mark.parametrize("words", ["--no-stream", "--no-str"])
def test_streaming_cannot_be_switched_off(words: str) -> None:
    """icefloe's own --no-stream sees to the space that the files then take."""
    with pytest.raises(UsageError):
        check_arguments(words.split(), stream=True)


@pytest.mark.parametrize("words", ["--config /x", "--config=/x", "--conf /x"])
def test_a_file_of_options_is_refused(words: str) -> None:
    """It may hold any of them (criu/config.c, parse_config)."""
    with pytest.raises(UsageError):
        check_arguments(words.split(), stream=True)


some_words = st.one_of(
    st.sampled_from(PREFIXES).map(lambda prefix: prefix[0]),
    st.sampled_from(PREFIXES).map(lambda prefix: f"{prefix[0]}=x"),
    st.text("dSsRthDovxVrjJlWLM4=-", max_size=4).map(lambda letters: f"-{letters}"),
    st.sampled_from(["--", "-", "x", "/x", "4", "mnt[x]:y", "--p", "--nonsense", "---R", "--=R"]),
)


@settings(max_examples=2000, deadline=None)
@given(st.lists(some_words, max_size=4), st.booleans())
@example(["--external", "-r", "-R"], True)
def test_nothing_refused_gets_through(words: list[str], stream: bool) -> None:
    """Whatever the words; those for which CRIU ends before it begins may pass."""
    given_ = parsed(words)
    names = {name for name, _ in given_.options}
    if not given_.wrong and names & (REFUSED_STREAMING if stream else REFUSED):
        assert refused(words, stream)


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from([*PREFIXES, ("-j", "j"), ("-v4", "v"), ("-lj", "j")]), max_size=4))
def test_what_is_well_meant_gets_through(options: list[tuple[str, str]]) -> None:
    """Options with plain values are refused for themselves only."""
    words = []
    for spelling, name in options:
        words.append(spelling)
        if LONG.get(name) == REQUIRED or name in "DJLMWort":
            words.append("/a/value")
    if not {name for _, name in options} & REFUSED_STREAMING:
        assert not refused(words)


# --- the cgroup that CRIU freezes ---------------------------------------------------------------


def last_freezer(words: Sequence[str]) -> str:
    """The one that CRIU uses."""
    values = [value for name, value in parsed(words).options if name == "freeze-cgroup"]
    return values[-1] or "" if values else ""


@pytest.mark.parametrize(
    "words",
    [
        "",
        "-j --shell-job",
        "--freeze-cgroup /x",
        "--freeze-cgroup=/x",
        "-j --freeze-cgroup /x -v4",
        "--freeze-cgroup=/x=y",
        "--freeze-cgroup=",
        "--tcp-established --freeze-cgroup /a/b",
    ],
)
def test_the_freezer(words: str) -> None:
    assert argument_of("--freeze-cgroup", words.split()) == last_freezer(words.split())


@pytest.mark.parametrize(
    "words", ["--fr /x", "--freeze /x", "--freeze=/x", "-j --freeze-cgrou=/x -v"]
)
def test_the_freezer_in_short(words: str) -> None:
    """Unknown, it would stay frozen when everybody is killed."""
    assert last_freezer(words.split()) == "/x"
    assert argument_of("--freeze-cgroup", words.split()) == "/x"


def test_the_last_freezer_counts() -> None:
    words = "--freeze-cgroup /a --freeze-cgroup=/b".split()
    assert last_freezer(words) == "/b"
    assert argument_of("--freeze-cgroup", words) == "/b"


def test_a_freezer_without_a_value() -> None:
    """CRIU says what is wrong."""
    assert argument_of("--freeze-cgroup", ["-j", "--freeze-cgroup"]) == ""


@pytest.mark.parametrize("refused", ["page-server", "lazy-pages ", "leave-running", "auto-dedup"])
def test_what_a_file_of_defaults_says(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU reads it by itself, so its options are as good as arguments."""
    file = tmp_path / "default.conf"
    monkeypatch.setenv("CRIU_CONFIG_FILE", str(file))
    check_defaults(stream=True)
    file.write_text(f"# {refused}\n\ntcp-established\nshell-job # as ever\n")
    check_defaults(stream=True)
    file.write_text(f"tcp-established\n  {refused}\n")
    with pytest.raises(UsageError, match=str(file)):
        check_defaults(stream=True)
