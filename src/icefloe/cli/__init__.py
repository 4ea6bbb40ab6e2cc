"""The command `icefloe`: parses arguments, calls the rooms, prints.

Commands live in modules of this package that import nothing heavy before they run: `--help` must
be there at once.
"""

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TextIO

import click

from icefloe import durable
from icefloe.cli import output
from icefloe.cli.capturing import capture
from icefloe.cli.content import add, export
from icefloe.cli.context import Context
from icefloe.cli.images import diff, ls, rm, show, tag
from icefloe.cli.page_server import page_server
from icefloe.cli.remotes import pull, push, remote
from icefloe.cli.restoring import fits, restore
from icefloe.cli.upkeep import check, gc
from icefloe.errors import EXIT_CODES, IcefloeError, NoSpace

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code}  {what}" for code, what in EXIT_CODES.items())

# What a shell reports for a process that an interrupt ended (128 + SIGINT).
_INTERRUPTED = 130


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--store", metavar="DIR", help="The store's folder (or ICEFLOE_STORE).")
@click.option("--config", metavar="FILE", help="The configuration file (or ICEFLOE_CONFIG).")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar, no remarks.")
@click.option("-v", "--verbose", is_flag=True, help="A traceback with every error.")
@click.version_option(package_name="icefloe")
@click.pass_context
def cli(
    context: click.Context, store: str | None, config: str | None, quiet: bool, verbose: bool
) -> None:
    """Stores and moves checkpoints of GPU workloads.

    An image is named NAME[:TAG] (tag `latest` when left out) or @ID, at least 8 hex digits.
    """
    context.obj = Context(store, config, quiet)


for _command in (
    add,
    capture,
    export,
    fits,
    restore,
    page_server,
    ls,
    show,
    diff,
    tag,
    rm,
    push,
    pull,
    remote,
    gc,
    check,
):
    cli.add_command(_command)


def run() -> None:
    """The command: `main`, and then the end of the process at once.

    Taking all the modules apart that S3 needs takes a quarter of a second, and nobody gains by it:
    whatever has to be cleaned up is in contexts that have ended by now.
    """
    code = 1
    try:
        main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    # A checkpoint holds everything that a process knew: files 0600, folders 0700.
    os.umask(0o077)
    arguments = sys.argv[1:] if arguments is None else arguments
    out = sys.stdout = sys.stdout or open(os.devnull, "w")  # None when it was closed
    if isinstance(out, TextIOWrapper):
        # Names of files are bytes, and needn't be text.
        out.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(arguments, prog_name="icefloe", standalone_mode=False)
        out.flush()
    except BaseException as error:
        # click answers a closed pipe with exit code 1 and other streams.
        if isinstance(error, BrokenPipeError) or sys.stdout is not out:
            _drop_output(out)  # who reads it has enough of it
            sys.exit(0)
        sys.exit(_report(error, "-v" in arguments or "--verbose" in arguments))
    # Without standalone mode, click returns the code that a command exits with.
    sys.exit(code if isinstance(code, int) else 0)


def _drop_output(out: TextIO) -> None:
    """What could not be written is not tried again at exit, where Python would complain."""
    with suppress(OSError, ValueError):  # it may be no file at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _report(error: BaseException, verbose: bool) -> int:
    """Prints an error as one line; returns the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if verbose:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        words = (error.__cause__ or error).args  # click wraps it
        done = "the store is whole; run it again, or see with `icefloe ls` what was done"
        _say(f"interrupted: {words[0] if words else done}")
        return _INTERRUPTED
    if isinstance(error, IcefloeError):
        _say(str(error))
        return error.exit_code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        print(error.format_message(), file=sys.stderr)
        return 2
    if isinstance(error, click.ClickException):
        advice = "`icefloe --help` lists the commands"
        if isinstance(error, click.UsageError) and error.ctx and error.ctx.info_name:
            advice = f"see `{error.ctx.command_path} --help`"
        _say(f"{error.format_message().rstrip('.')}: {advice}")
        return 2
    if isinstance(error, OSError) and error.filename is not None:
        _say(f"cannot use {error.filename} ({error.strerror}): check its permissions and its disk")
        return 3
    if isinstance(error, OSError) and error.errno in durable.FULL:  # of the store: NoSpace
        _drop_output(sys.stdout)
        _say(f"cannot write the output ({error.strerror}): free some space there")
        return NoSpace.exit_code
    _say(f"unexpected {type(error).__name__} ({error}): run it with -v and report what it prints")
    return 1


def _say(message: str) -> None:
    with suppress(OSError):  # the exit code says it too
        print("icefloe:", output.printable(" ".join(message.split())), file=sys.stderr, flush=True)
