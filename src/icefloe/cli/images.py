"""`ls`, `show`, `diff`, `tag`, `rm`: which images there are, and what they hold."""

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from icefloe.cli import output
from icefloe.cli.context import Context

if TYPE_CHECKING:
    from icefloe.gc.capacity import Description, Listed

_json = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on standard output."
)


@click.command()
@click.argument("pattern", required=False)
@_json
@click.pass_obj
def ls(context: Context, pattern: str | None, as_json: bool) -> None:
    """List images.

    PATTERN is a shell pattern for NAME or NAME:TAG.
    """
    from icefloe.gc.capacity import summarise

    with context.open() as store:
        listed = [item for item in summarise(store) if _matches(item, pattern)]
    if as_json:
        output.print_json([_listed_json(item) for item in listed])
        return
    rows = [
        (
            name,
            f"@{item.image.id.hex()[:12]}",
            output.when(item.image.created),
            output.size(item.image.logical_bytes),
            output.size(item.image.zero_bytes),
            output.size(item.image.raw_bytes),
        )
        for item in listed
        for name in item.names or ("-",)
    ]
    headings = ("NAME", "ID", "CREATED", "LOGICAL", "ZERO", "RAW")
    output.table(headings, rows, right={3, 4, 5})


def _matches(item: "Listed", pattern: str | None) -> bool:
    if pattern is None:
        return True
    bare = [name.rpartition(":")[0] for name in item.names]
    return any(fnmatchcase(name, pattern) for name in [*item.names, *bare])


def _listed_json(item: "Listed") -> dict[str, Any]:
    return {
        "id": item.image.id.hex(),
        "names": list(item.names),
        "created": item.image.created,
        "logical_bytes": item.image.logical_bytes,
        "zero_bytes": item.image.zero_bytes,
        "raw_bytes": item.image.raw_bytes,
        "blocks": item.image.blocks,
        "files": item.image.files,
    }


@click.command()
@click.argument("name")
@_json
@click.pass_obj
def show(context: Context, name: str, as_json: bool) -> None:
    """Tell what one image holds and costs."""
    from icefloe.gc.capacity import describe
    from icefloe.ids import parse_reference

    reference = parse_reference(name)
    with context.open() as store:
        shown = describe(store, store.catalog.resolve(reference))
    if as_json:
        output.print_json(_description_json(shown))
        return
    manifest = shown.manifest
    rows = [
        ("image", f"@{shown.image.id.hex()}"),
        ("names", ", ".join(shown.names) or "-"),
        ("created", output.when(shown.image.created)),
        *((f"label {key}", value) for key, value in manifest.labels.items()),
        ("logical", output.size(manifest.logical_bytes)),
        ("zero", output.size(manifest.zero_bytes)),
        ("raw", f"{output.size(manifest.raw_bytes)} in {len(manifest.blocks)} blocks"),
        ("stored", output.size(shown.stored_bytes)),
        ("exclusive", f"{output.size(shown.exclusive_bytes)} (what removing it would free)"),
        ("reads", f"{manifest.read_amplification:.2f} times its bytes"),
    ]
    rows += [
        (
            f"codec {c.codec}",
            f"{c.blocks} blocks, {output.size(c.raw_bytes)} -> {output.size(c.stored_bytes)}",
        )
        for c in shown.codecs
    ]
    output.facts(rows)
    print()
    files = [
        (
            file.path or ".",
            file.kind.name.lower(),
            output.size(file.size),
            output.size(manifest.zero_bytes_of(i)),
        )
        for i, file in enumerate(manifest.files)
    ]
    output.table(("FILE", "KIND", "SIZE", "ZERO"), files, right={2, 3})


def _description_json(shown: "Description") -> dict[str, Any]:
    manifest = shown.manifest
    return {
        "id": shown.image.id.hex(),
        "names": list(shown.names),
        "created": shown.image.created,
        "files": [
            {
                "path": file.path,
                "kind": file.kind.name.lower(),
                "bytes": file.size,
                "zero_bytes": manifest.zero_bytes_of(i),
            }
            for i, file in enumerate(manifest.files)
        ],
        "logical_bytes": manifest.logical_bytes,
        "zero_bytes": manifest.zero_bytes,
        "raw_bytes": manifest.raw_bytes,
        "blocks": len(manifest.blocks),
        "stored_bytes": shown.stored_bytes,
        "exclusive_bytes": shown.exclusive_bytes,
        "read_amplification": round(manifest.read_amplification, 4),
        "codecs": {
            c.codec: {
                "blocks": c.blocks,
                "raw_bytes": c.raw_bytes,
                "stored_bytes": c.stored_bytes,
            }
            for c in shown.codecs
        },
        "facts": dict(manifest.facts),
        "labels": dict(manifest.labels),
    }


@click.command()
@click.argument("a")
@click.argument("b")
@_json
@click.pass_obj
def diff(context: Context, a: str, b: str, as_json: bool) -> None:
    """Tell what two images share.

    Sizes are raw bytes of blocks; the files that differ are listed.
    """
    from icefloe.gc.capacity import compare
    from icefloe.ids import parse_reference

    first, second = parse_reference(a), parse_reference(b)
    with context.open() as store:
        found = compare(store, store.catalog.resolve(first), store.catalog.resolve(second))
    if as_json:
        output.print_json(
            {
                "shared_bytes": found.shared_bytes,
                "only_a_bytes": found.only_a_bytes,
                "only_b_bytes": found.only_b_bytes,
                "files": [
                    {
                        "path": file.path,
                        "change": file.change,
                        "a_bytes": file.a_bytes,
                        "b_bytes": file.b_bytes,
                    }
                    for file in found.files
                ],
            }
        )
        return
    output.facts(
        [
            ("shared", output.size(found.shared_bytes)),
            (f"only {a}", output.size(found.only_a_bytes)),
            (f"only {b}", output.size(found.only_b_bytes)),
        ]
    )
    if found.files:
        print()
        rows = [
            (f.path or ".", f.change, output.size(f.a_bytes), output.size(f.b_bytes))
            for f in found.files
        ]
        output.table(("FILE", "CHANGE", a, b), rows, right={2, 3})


@click.command()
@click.argument("name")
@click.argument("new")
@_json
@click.pass_obj
def tag(context: Context, name: str, new: str, as_json: bool) -> None:
    """Give an image one more name."""
    from icefloe.ids import parse_name, parse_reference

    reference, wanted = parse_reference(name), parse_name(new)
    with context.open(write=True) as store:
        image = store.catalog.resolve(reference)
        before = store.catalog.named(wanted)
        if before != image:
            store.commit("tag", names={str(wanted): image})
    replaced = before if before != image else None
    if as_json:
        document = {"id": image.hex(), "name": str(wanted)}
        output.print_json({**document, "replaced": replaced and replaced.hex()})
    else:
        print(f"{wanted} is @{image.hex()[:12]}")
        if replaced and not context.quiet:
            click.echo(f"it was @{replaced.hex()[:12]} before; that image is kept", err=True)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_json
@click.pass_obj
def rm(context: Context, names: tuple[str, ...], as_json: bool) -> None:
    """Remove names, and images without any.

    An image goes with its last name; @ID takes the image and all its names. The space comes
    back with the next `icefloe gc`.
    """
    from icefloe.gc.removal import remove
    from icefloe.ids import parse_reference

    references = [parse_reference(name) for name in names]
    with context.open(write=True) as store:
        removal = remove(store, references)
    if as_json:
        output.print_json(
            {
                "names": list(removal.names),
                "images": [image.hex() for image in removal.images],
                "freed_bytes": removal.freed_bytes,
            }
        )
        return
    for name in removal.names:
        print(f"removed name {name}")
    for image in removal.images:
        print(f"removed image @{image.hex()[:12]}")
    if removal.images:
        print(f"`icefloe gc` will give back up to {output.size(removal.freed_bytes)}")
