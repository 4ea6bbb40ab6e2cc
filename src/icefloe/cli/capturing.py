"""`capture`: running processes go into the store."""

from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from icefloe.cli import output
from icefloe.cli.content import labels_of, parent_of, say_replaced, stored, stored_json
from icefloe.cli.context import Context

if TYPE_CHECKING:
    from icefloe.capture.capture import CaptureResult


@click.command()
@click.argument("name")
@click.argument("criu_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- CRIU ARGS]")
@click.option("--pid", type=int, required=True, metavar="PID", help="The first process.")
@click.option("--leave-running", is_flag=True, help="The processes go on afterwards.")
@click.option(
    "--cuda",
    type=click.Choice(["auto", "off"]),
    default="auto",
    help="Suspend CUDA in the processes that use it (auto), or leave it to CRIU.",
)
@click.option("--no-stream", is_flag=True, help="CRIU writes files first; they are added then.")
@click.option(
    "--parent", metavar="NAME", help="Compare with this image page by page, or with `none`."
)
@click.option("--pages", multiple=True, metavar="GLOB", help="More files that hold memory.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label to keep with it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.pass_obj
def capture(
    context: Context,
    name: str,
    criu_arguments: tuple[str, ...],
    pid: int,
    leave_running: bool,
    cuda: Any,
    no_stream: bool,
    parent: str | None,
    pages: tuple[str, ...],
    labels: tuple[str, ...],
    as_json: bool,
) -> None:
    """Checkpoint a running process tree straight into the store.

    The processes end when their image is durable, or go on with --leave-running. Should anything
    fail, they go on, and nothing is stored.
    """
    started = monotonic()
    from icefloe.capture.cuda import Nvidia
    from icefloe.capture.interrupts import end_on_signals
    from icefloe.capture.undo import stand_by
    from icefloe.ids import parse_name

    wanted, kept = parse_name(name), labels_of(labels)
    config = context.config()
    watcher = stand_by(Nvidia, config.cuda_seconds)
    end_on_signals()
    from icefloe.capture.capture import CaptureOptions, capture_tree, check
    from icefloe.capture.ingest import IngestOptions

    options = CaptureOptions(
        pid=pid,
        ingest=IngestOptions(config.policy, config.workers, pages, parent=parent_of(parent)),
        criu=config.criu,
        arguments=criu_arguments,
        leave_running=leave_running,
        stream=not no_stream,
        cuda=cuda,
        cuda_seconds=config.cuda_seconds,
    )
    check(options)  # before a store is made for nothing
    with (
        context.open(write=True, create=True) as store,
        context.progress("capturing", None) as progress,
    ):
        result = capture_tree(store, wanted, kept, options, watcher, Nvidia, progress)
    seconds = monotonic() - started
    if as_json:
        output.print_json(_json(result, str(wanted), seconds))
        return
    output.facts(_rows(result, str(wanted), seconds, leave_running))
    if result.not_recompressed is not None:
        click.echo(
            f"blocks that were stored in a hurry stay as they are ({result.not_recompressed})",
            err=True,
        )
    say_replaced(context, str(wanted), result.added)


def _rows(
    result: "CaptureResult", name: str, seconds: float, leave_running: bool
) -> list[tuple[str, str]]:
    frozen = result.frozen
    until = "until they ran on" if leave_running else "until they were gone"
    parts = [("CUDA", frozen.cuda), ("memory", frozen.dump)]
    parts += [("commit", frozen.committing), ("end", frozen.ending)]
    shown = ", ".join(f"{what} {spent:.2f}" for what, spent in parts if spent >= 0.005)
    gpu = f", {result.cuda_processes} with CUDA" if result.cuda_processes else ""
    return [
        *stored(name, result.added),
        ("processes", f"{result.processes}{gpu}"),
        ("frozen", f"{frozen.seconds:.2f} s {until} ({shown})"),
        ("time", f"{seconds:.2f} s, {output.rate(result.added.logical_bytes, seconds)}"),
    ]


def _json(result: "CaptureResult", name: str, seconds: float) -> dict[str, Any]:
    frozen = result.frozen
    return {
        **stored_json(name, result.added),
        "recompressed_bytes": result.recompressed_bytes,
        "seconds": round(seconds, 3),
        "frozen_seconds": round(frozen.seconds, 4),
        "cuda_seconds": round(frozen.cuda, 4),
        "processes": result.processes,
        "cuda_processes": result.cuda_processes,
        "frozen": {
            "cuda_lock": round(frozen.cuda_lock, 4),
            "cuda_checkpoint": round(frozen.cuda_checkpoint, 4),
            "dump": round(frozen.dump, 4),
            "criu_freezing": round(frozen.freezing, 4),
            "criu_collecting": round(frozen.collecting, 4),
            "criu_writing": round(frozen.writing, 4),
            "commit": round(frozen.committing, 4),
            "end": round(frozen.ending, 4),
            "cuda_resume": round(frozen.cuda_resume, 4),
        },
    }
