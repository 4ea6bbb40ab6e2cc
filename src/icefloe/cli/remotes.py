"""`push`, `pull` and `remote`: images in buckets and shared folders."""

from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from icefloe.cli import output
from icefloe.cli.context import Context
from icefloe.errors import ImageNotFound, NotInRemote, UsageError

if TYPE_CHECKING:
    from icefloe.config import Config
    from icefloe.ids import IdPrefix, Name
    from icefloe.transfer.options import RemoteOptions
    from icefloe.transfer.remote import Remote

_json = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on standard output."
)
key_file = click.option(
    "--encrypt-key-file", "keys", metavar="FILE", help="The keys of an encrypted remote."
)


def remote_options(config: "Config", keys: str | None) -> "RemoteOptions":
    """How to reach remotes, with the keys that the command line names."""
    return replace(config.remote, keys=Path(keys)) if keys else config.remote


def find_source(
    urls: tuple[str, ...], config: "Config", keys: str | None, reference: "Name | IdPrefix"
) -> "Remote":
    """The first of these remotes that has an image; the caller closes it. Raises NotInRemote."""
    from icefloe.transfer.remote import open_remote

    known = urls or ((config.remote_url,) if config.remote_url else ())
    if not known:
        raise UsageError("no remote is named", "write its URL, or set remote.url")
    for url in known:
        remote = open_remote(url, remote_options(config, keys))
        try:
            if len(known) > 1:
                remote.resolve(reference)
            return remote
        except NotInRemote:
            remote.close()
    raise NotInRemote(str(reference), known[-1])


@click.command()
@click.argument("name")
@click.argument("url", metavar="REMOTE", required=False)
@key_file
@_json
@click.pass_obj
def push(context: Context, name: str, url: str | None, keys: str | None, as_json: bool) -> None:
    """Send an image to a remote: s3://BUCKET/PREFIX or file:///FOLDER.

    Only blocks that the remote lacks are sent. Interrupted, the command goes on where it stopped.
    """
    started = monotonic()
    from icefloe.ids import Name, parse_name, parse_reference
    from icefloe.transfer.push import push_image
    from icefloe.transfer.remote import open_remote

    config, reference = context.config(), parse_reference(name)
    place = url or config.remote_url
    if not place:
        raise UsageError("no remote is named", "write its URL, or set remote.url")
    with context.open() as store:
        image = store.catalog.resolve(reference)
        known = [parse_name(each) for each in store.catalog.names_of(image)]
        names = [reference] if isinstance(reference, Name) else known
        if not names:
            raise UsageError(f"{name} has no name", "give it one: `icefloe tag`")
        missing = store.catalog.image(image)
        if missing is None:
            raise ImageNotFound(name)
        with (
            open_remote(place, remote_options(config, keys), create=True) as remote,
            context.progress("pushing", None) as progress,
        ):
            result = push_image(store, image, names, remote, progress)
    seconds = monotonic() - started
    if as_json:
        output.print_json(
            {
                "id": image.hex(),
                "names": [str(each) for each in names],
                "logical_bytes": result.logical_bytes,
                "new_bytes": result.new_bytes,
                "wire_bytes": result.wire_bytes,
                "requests": result.requests,
                "blocks_sent": result.blocks_sent,
                "blocks_skipped": result.blocks_skipped,
                "replaced": [each.hex() for each in result.replaced],
                "sources": {place: result.wire_bytes},
                "seconds": round(seconds, 3),
            }
        )
        return
    output.facts(
        [
            ("image", f"{', '.join(map(str, names))}  @{image.hex()[:12]}"),
            ("logical", output.size(result.logical_bytes)),
            ("sent", _blocks(result.new_bytes, result.blocks_sent, result.blocks_skipped)),
            ("on the wire", f"{output.size(result.wire_bytes)} in {result.requests} requests"),
            ("time", f"{seconds:.2f} s, {output.rate(result.new_bytes, seconds)}"),
        ]
    )


@click.command()
@click.argument("name")
@click.argument("urls", metavar="[REMOTE]...", nargs=-1)
@key_file
@_json
@click.pass_obj
def pull(
    context: Context, name: str, urls: tuple[str, ...], keys: str | None, as_json: bool
) -> None:
    """Bring an image from a remote into the store.

    Only blocks that the store lacks come. Interrupted, the command goes on where it stopped.
    """
    started = monotonic()
    from icefloe.ids import Name, parse_reference
    from icefloe.transfer.leases import pulling
    from icefloe.transfer.pull import pull_image

    config, reference = context.config(), parse_reference(name)
    wanted = reference if isinstance(reference, Name) else None
    with (
        find_source(urls, config, keys, reference) as remote,
        pulling(remote),
        context.progress("pulling", None) as progress,
    ):
        image = remote.image(remote.resolve(reference))
        result = pull_image(config.store, remote, image, wanted, progress)
    seconds = monotonic() - started
    if as_json:
        output.print_json(
            {
                "id": image.id.hex(),
                "name": wanted and str(wanted),
                "logical_bytes": result.logical_bytes,
                "new_bytes": result.new_bytes,
                "wire_bytes": result.wire_bytes,
                "requests": result.requests,
                "blocks_sent": result.blocks_sent,
                "blocks_skipped": result.blocks_skipped,
                "replaced": result.replaced and result.replaced.hex(),
                "sources": {remote.url: result.wire_bytes},
                "seconds": round(seconds, 3),
            }
        )
        return
    output.facts(
        [
            ("image", f"{wanted or ''}  @{image.id.hex()[:12]}".strip()),
            ("logical", output.size(result.logical_bytes)),
            ("came", _blocks(result.new_bytes, result.blocks_sent, result.blocks_skipped)),
            ("on the wire", f"{output.size(result.wire_bytes)} in {result.requests} requests"),
            ("time", f"{seconds:.2f} s, {output.rate(result.new_bytes, seconds)}"),
        ]
    )
    if result.replaced and not context.quiet:
        click.echo(f"{wanted} was @{result.replaced.hex()[:12]} before; it is kept", err=True)


def _blocks(count: int, blocks: int, skipped: int) -> str:
    return f"{output.size(count)} in {blocks} blocks; {skipped} were there"


@click.group()
def remote() -> None:
    """List, clean and audit a remote."""


@remote.command("ls")
@click.argument("url", metavar="REMOTE")
@key_file
@_json
@click.pass_obj
def remote_ls(context: Context, url: str, keys: str | None, as_json: bool) -> None:
    """List the names in a remote."""
    from icefloe.transfer.remote import open_remote

    with open_remote(url, remote_options(context.config(), keys)) as there:
        names = there.names()
    if as_json:
        shown: list[dict[str, Any]] = [
            {"name": name, "id": entry.image and entry.image.hex(), "time": entry.time}
            for name, entry in names.items()
        ]
        output.print_json(shown)
        return
    rows = [
        (name, f"@{entry.image.hex()[:12]}" if entry.image else "-", output.when(entry.time))
        for name, entry in names.items()
    ]
    output.table(("NAME", "ID", "PUSHED"), rows, right=set())


@remote.command("rm")
@click.argument("url", metavar="REMOTE")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@key_file
@_json
@click.pass_obj
def remote_rm(
    context: Context, url: str, names: tuple[str, ...], keys: str | None, as_json: bool
) -> None:
    """Take names away in a remote.

    What no name leads to any more goes with the next `remote gc`.
    """
    from icefloe.ids import parse_name
    from icefloe.transfer.remote import open_remote

    wanted = [parse_name(name) for name in names]
    with open_remote(url, remote_options(context.config(), keys)) as there:
        there.remove_names(wanted)
    removed = [str(name) for name in wanted]
    if as_json:
        output.print_json({"names": removed})
        return
    output.facts([("removed", ", ".join(removed))])


@remote.command("gc")
@click.argument("url", metavar="REMOTE")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--grace", metavar="D", help="Keep what is younger than this (90s, 2h, 1d).")
@key_file
@_json
@click.pass_obj
def remote_gc(
    context: Context,
    url: str,
    dry_run: bool,
    grace: str | None,
    keys: str | None,
    as_json: bool,
) -> None:
    """Give back the space of what no name of a remote leads to."""
    started = monotonic()
    from icefloe.config import parse_duration
    from icefloe.transfer.collect import collect_remote
    from icefloe.transfer.remote import open_remote

    config = context.config()
    seconds = config.remote_grace_seconds if grace is None else parse_duration(grace)
    with open_remote(url, remote_options(config, keys)) as there:
        result = collect_remote(there, seconds, dry_run=dry_run)
    took = monotonic() - started
    if as_json:
        output.print_json({"dry_run": dry_run, **asdict(result), "seconds": round(took, 3)})
        return
    would = "would be " if dry_run else ""
    gone = f"{result.images_removed} images, {result.packs_removed} packs"
    output.facts(
        [
            (f"{would}freed", output.size(result.freed_bytes)),
            (f"{would}removed", gone),
            (f"{would}rewritten", f"{result.packs_rewritten} packs"),
            ("unfinished uploads", f"{result.uploads_removed} removed"),
            ("kept by grace", f"{result.kept_by_grace} objects"),
            ("kept for others at work", f"{result.kept_by_lease} objects"),
            ("time", f"{took:.2f} s"),
        ]
    )


@remote.command("check")
@click.argument("url", metavar="REMOTE")
@click.option("--read-data", is_flag=True, help="Read and verify every byte of every pack.")
@key_file
@_json
@click.pass_obj
def remote_check(
    context: Context, url: str, read_data: bool, keys: str | None, as_json: bool
) -> None:
    """Audit a remote: names, images, indexes, packs.

    Exits with 4 when something is damaged.
    """
    from icefloe.transfer.audit import check_remote
    from icefloe.transfer.remote import open_remote

    with (
        open_remote(url, remote_options(context.config(), keys)) as there,
        context.progress("reading", None) as progress,
    ):
        audit = check_remote(there, read_data=read_data, progress=progress)
    if as_json:
        counts = {"images": audit.images, "blocks": audit.blocks, "packs": audit.packs}
        problems = [{**asdict(problem), "repaired": False} for problem in audit.problems]
        output.print_json({"ok": audit.ok, **counts, "names": audit.names, "problems": problems})
    else:
        print(f"{audit.names} names, {audit.images} images, {audit.blocks} blocks")
        for problem in audit.problems:
            weight = "waste" if problem.waste else "DAMAGE"
            print(output.printable(f"{weight}  {problem.kind}: {problem.what}"))
        print("ok" if audit.ok else "damaged")
    if not audit.ok:
        raise click.exceptions.Exit(4)
