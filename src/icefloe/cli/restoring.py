"""`restore`: processes come back to life."""

from dataclasses import asdict, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from icefloe.cli import output
from icefloe.cli.content import labels_of
from icefloe.cli.context import Context
from icefloe.cli.remotes import find_source, key_file
from icefloe.errors import Incompatible, UsageError

if TYPE_CHECKING:
    from icefloe.capture.remote_restore import RemoteRestoreResult
    from icefloe.capture.restore import RestoreResult


@click.command()
@click.argument("name")
@click.argument("criu_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- CRIU ARGS]")
@click.option("--eager", "door", flag_value="eager", help="Same as --door eager.")
@click.option("--stream", "door", flag_value="stream", help="Same as --door stream.")
@click.option(
    "--door",
    type=click.Choice(["auto", "lazy", "eager", "stream"]),
    default="auto",
    help="The way into CRIU; auto: lazy, unless earlier restores show that it loses.",
)
@click.option(
    "--from",
    "urls",
    multiple=True,
    metavar="REMOTE",
    help="Take the image from there.",
)
@key_file
@click.option("--no-fill", is_flag=True, help="Bring in only the memory that is touched.")
@click.option(
    "--expect", "expected", multiple=True, metavar="K=V", help="A label that the image must have."
)
@click.option("--ignore-incompatible", is_flag=True, help="Try even if this machine doesn't fit.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.pass_obj
def restore(
    context: Context,
    name: str,
    criu_arguments: tuple[str, ...],
    door: Any,
    urls: tuple[str, ...],
    keys: str | None,
    no_fill: bool,
    expected: tuple[str, ...],
    ignore_incompatible: bool,
    as_json: bool,
) -> None:
    """Restore a process tree from an image.

    The processes run as soon as CRIU has put them together; their memory arrives while they do.
    The command ends when it is complete, and they go on without it.

    With --from, nothing of the image needs to be here; the store keeps what comes.
    """
    started = monotonic()
    from icefloe.capture.cuda import Nvidia
    from icefloe.capture.guard import stand_guard
    from icefloe.capture.interrupts import end_on_signals
    from icefloe.ids import Name, parse_reference

    reference = parse_reference(name)
    if no_fill and door in ("eager", "stream"):
        raise UsageError(f"--no-fill is no use with --{door}", "leave out one of them")
    if no_fill and urls:
        raise UsageError("--no-fill needs the image in the store", "pull it first")
    if keys and not urls:
        raise UsageError("--encrypt-key-file is for remotes", "name one by --from")
    config, wanted = context.config(), labels_of(expected)
    guard = stand_guard()
    end_on_signals()
    from icefloe.capture.restore import RestoreOptions, lineage_of, restore_image

    options = RestoreOptions(
        lineage=reference.name if isinstance(reference, Name) else "",
        door="lazy" if no_fill else None if door == "auto" else door,
        criu=config.criu,
        arguments=criu_arguments,
        fill=not no_fill,
        workers=config.workers,
        expected=wanted,
        ignore_incompatible=ignore_incompatible,
        cuda_seconds=config.cuda_seconds,
    )
    came: RemoteRestoreResult | None = None
    try:
        if urls:
            from icefloe.capture.remote_restore import restore_from_remote
            from icefloe.transfer.leases import pulling

            named = reference if isinstance(reference, Name) else None
            with find_source(urls, config, keys, reference) as remote, pulling(remote):
                there = remote.image(remote.resolve(reference))
                options = replace(options, lineage=options.lineage or there.id.hex())
                came = restore_from_remote(
                    config.store,
                    remote,
                    there,
                    named,
                    options,
                    guard,
                    started,
                    Nvidia,
                    config.fetch_first_bytes,
                )
                result = came.restore
        else:
            with context.open() as store:
                image = store.catalog.resolve(reference)
                options = replace(options, lineage=lineage_of(store, image, reference))
                result = restore_image(store, image, options, guard, started, Nvidia)
    except KeyboardInterrupt:
        words = "what was restored was killed, as its memory was not complete; run it again"
        raise KeyboardInterrupt(words) from None
    if not context.quiet:
        for mismatch in result.differences:
            click.echo(f"note: {output.printable(mismatch.sentence)}", err=True)
    if came is not None and came.unkept is not None:
        click.echo(f"the store has not kept the image: {came.unkept}", err=True)
    if as_json:
        output.print_json(_json(result, came))
        return
    output.facts([*_rows(result), *_remote_rows(came)])


@click.command()
@click.argument("name")
@click.option(
    "--expect", "expected", multiple=True, metavar="K=V", help="A label that the image must have."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.pass_obj
def fits(context: Context, name: str, expected: tuple[str, ...], as_json: bool) -> int:
    """Tell whether this machine can restore an image, and why not.

    The exit code is 0 if it can, 5 if something blocks.
    """
    from icefloe.capture.criu import find_criu
    from icefloe.capture.cuda import Nvidia
    from icefloe.capture.gate import judge
    from icefloe.ids import parse_reference

    reference, wanted = parse_reference(name), labels_of(expected)
    with context.open() as store:
        image = store.catalog.resolve(reference)
        manifest = store.manifest(image)
    verdict = judge(manifest, find_criu(context.config().criu), wanted, Nvidia)
    if as_json:
        found = [asdict(mismatch) for mismatch in verdict.mismatches]
        output.print_json({"id": image.hex(), "fits": verdict.fits, "mismatches": found})
    else:
        print("fits" if verdict.fits else "does not fit")
        for mismatch in verdict.mismatches:
            print(f"{mismatch.severity}: {output.printable(mismatch.sentence)}")
    return 0 if verdict.fits else Incompatible.exit_code


def _rows(result: "RestoreResult") -> list[tuple[str, str]]:
    rows = [
        ("process", str(result.pid)),
        ("door", result.door),
        ("running", f"after {result.seconds_to_resume:.2f} s, {result.criu_seconds:.2f} s of CRIU"),
    ]
    if result.cuda_seconds:
        rows.append(("CUDA", f"awake after {result.cuda_seconds:.2f} s"))
    if result.door != "lazy":
        return rows
    memory = output.size(result.memory_bytes)
    if result.filled_seconds is not None:
        rows.append(("memory", f"{memory}, complete after {result.filled_seconds:.2f} s"))
    else:
        rows.append(("memory", f"{memory}; the process has ended"))
    avoided = f", {result.faults_avoided} avoided by the trace" if result.faults_avoided else ""
    waited = f"it waited {result.stalled_seconds:.2f} s"
    return [*rows, ("faults", f"{result.faults}{avoided}; {waited}")]


def _remote_rows(came: "RemoteRestoreResult | None") -> list[tuple[str, str]]:
    if came is None:
        return []
    kept = "" if came.kept_seconds is None else f", kept after {came.kept_seconds:.2f} s"
    return [("on the wire", f"{output.size(came.wire_bytes)}{kept}")]


def _json(result: "RestoreResult", came: "RemoteRestoreResult | None") -> dict[str, Any]:
    return {
        "pid": result.pid,
        "door": result.door,
        "seconds_to_resume": round(result.seconds_to_resume, 4),
        "criu_seconds": round(result.criu_seconds, 4),
        "cuda_seconds": round(result.cuda_seconds, 4),
        "filled_seconds": result.filled_seconds and round(result.filled_seconds, 4),
        "wire_bytes": came.wire_bytes if came else 0,
        "timeline": came and _timeline(result, came),
        "faults": result.faults,
        "faults_avoided": result.faults_avoided,
        "stalled_seconds": round(result.stalled_seconds, 4),
        "memory_bytes": result.memory_bytes,
        "ended": result.ended,
    }


def _timeline(result: "RestoreResult", came: "RemoteRestoreResult") -> dict[str, float | None]:
    """Seconds since the command began."""
    return {
        "image": round(came.image_seconds, 4),
        "first_blocks": round(came.first_blocks_seconds, 4),
        "resumed": round(result.seconds_to_resume, 4),
        "filled": result.filled_seconds and round(result.filled_seconds, 4),
        "kept": came.kept_seconds and round(came.kept_seconds, 4),
    }
