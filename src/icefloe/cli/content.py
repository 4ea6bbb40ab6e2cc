"""`add` and `export`: bytes in, bytes out."""

from os.path import realpath
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from icefloe.cli import output
from icefloe.cli.context import Context
from icefloe.errors import UsageError

if TYPE_CHECKING:
    from icefloe.capture.ingest import AddResult
    from icefloe.capture.parent import ParentChoice


def _place(context: click.Context, parameter: click.Parameter, value: str) -> Path:
    """An empty path, as an unset variable of a shell gives, is not the current folder."""
    if not value:
        raise UsageError("an empty path names nothing", "name a folder, `.` for this one")
    return Path(value)


def labels_of(pairs: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE arguments. Raises UsageError."""
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"{pair!r} is not a label", "write KEY=VALUE")
        labels[key] = value
    return labels


def stored(name: str, result: "AddResult") -> list[tuple[str, str]]:
    """What was stored, for people."""
    new = f"{output.size(result.new_bytes)} in {result.new_blocks} of {result.blocks} blocks"
    return [
        ("image", f"{name}  @{result.id.hex()[:12]}"),
        ("logical", output.size(result.logical_bytes)),
        ("zero", output.size(result.zero_bytes)),
        ("new", new),
        ("store grew by", output.size(result.stored_bytes)),
    ]


def stored_json(name: str, result: "AddResult") -> dict[str, Any]:
    """What was stored, for programs."""
    return {
        "id": result.id.hex(),
        "name": name,
        "logical_bytes": result.logical_bytes,
        "zero_bytes": result.zero_bytes,
        "new_bytes": result.new_bytes,
        "stored_bytes": result.stored_bytes,
        "blocks": result.blocks,
        "new_blocks": result.new_blocks,
        "replaced": result.replaced and result.replaced.hex(),
    }


def parent_of(text: str | None) -> "ParentChoice":
    """The value of --parent. Raises UsageError."""
    from icefloe.ids import parse_reference

    return "none" if text == "none" else None if text is None else parse_reference(text)


def say_replaced(context: Context, name: str, result: "AddResult") -> None:
    """A remark about the image that had the name before."""
    if result.replaced and not context.quiet:
        click.echo(f"{name} was @{result.replaced.hex()[:12]} before; that image is kept", err=True)


@click.command()
@click.argument("path", callback=_place)
@click.argument("name")
@click.option(
    "--parent", metavar="NAME", help="Compare with this image page by page, or with `none`."
)
@click.option("--pages", multiple=True, metavar="GLOB", help="More files that hold memory.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label to keep with it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.pass_obj
def add(
    context: Context,
    path: Path,
    name: str,
    parent: str | None,
    pages: tuple[str, ...],
    labels: tuple[str, ...],
    as_json: bool,
) -> None:
    """Store a checkpoint under a name.

    PATH is a directory, or a .tar, .tar.gz or .tar.zst archive.
    """
    from icefloe.capture.add import add_checkpoint, open_checkpoint
    from icefloe.capture.ingest import IngestOptions
    from icefloe.ids import parse_name

    started = monotonic()
    wanted, kept = parse_name(name), labels_of(labels)
    config = context.config()
    # Not Path.resolve(), which fails on a link that leads to itself.
    if Path(realpath(config.store)).is_relative_to(realpath(path)):
        raise UsageError(f"{path} holds the store {config.store}", "name another with --store")
    checkpoint = open_checkpoint(path)
    options = IngestOptions(config.policy, config.workers, pages, parent=parent_of(parent))
    with (
        context.open(write=True, create=True) as store,
        context.progress("storing", checkpoint.logical_bytes()) as progress,
    ):
        result = add_checkpoint(store, checkpoint, wanted, kept, options, progress)
    seconds = monotonic() - started
    if as_json:
        shown = stored_json(str(wanted), result)
        output.print_json({**shown, "seconds": round(seconds, 3)})
        return
    time = f"{seconds:.2f} s, {output.rate(result.logical_bytes, seconds)}"
    output.facts([*stored(str(wanted), result), ("time", time)])
    say_replaced(context, str(wanted), result)


@click.command()
@click.argument("name")
@click.argument("folder", metavar="DIR", callback=_place)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.pass_obj
def export(context: Context, name: str, folder: Path, as_json: bool) -> None:
    """Write the exact files of an image to a folder."""
    from icefloe.capture.export import export_image
    from icefloe.ids import parse_reference

    started = monotonic()
    reference = parse_reference(name)
    with context.open() as store:
        image = store.catalog.resolve(reference)
        row = store.catalog.image(image)
        with context.progress("exporting", row.logical_bytes if row else None) as progress:
            result = export_image(store, image, folder, context.config().workers, progress)
    seconds = monotonic() - started
    if as_json:
        output.print_json(
            {
                "id": result.id.hex(),
                "path": str(folder),
                "files": result.files,
                "logical_bytes": result.logical_bytes,
                "written_bytes": result.written_bytes,
                "seconds": round(seconds, 3),
            }
        )
        return
    output.facts(
        [
            ("image", f"{name}  @{result.id.hex()[:12]}"),
            ("folder", f"{folder}, {result.files} entries"),
            ("logical", output.size(result.logical_bytes)),
            ("written", output.size(result.written_bytes)),
            ("time", f"{seconds:.2f} s, {output.rate(result.logical_bytes, seconds)}"),
        ]
    )
