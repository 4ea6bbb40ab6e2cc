"""`gc` and `check`: keep a store small and true."""

from time import monotonic

import click

from icefloe.cli import output
from icefloe.cli.context import Context
from icefloe.errors import UsageError


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--grace", metavar="D", help="Keep what was removed less than this ago (90s, 2h).")
@click.option("--repack", is_flag=True, help="Then code what is left by the policy.")
@click.option("--policy", metavar="P", help="fast, balanced, small or auto; for --repack.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.pass_obj
def gc(
    context: Context,
    dry_run: bool,
    grace: str | None,
    repack: bool,
    policy: str | None,
    as_json: bool,
) -> None:
    """Give back the space of what no image needs."""
    from icefloe.config import parse_duration, parse_policy
    from icefloe.gc.recompress import repack as repack_all
    from icefloe.gc.sweep import GcOptions, collect

    started, config = monotonic(), context.config()
    if policy is not None and not repack:
        raise UsageError("--policy says how to repack", "give --repack as well")
    if repack and dry_run:
        raise UsageError("what --repack frees shows only when it is done", "leave out --dry-run")
    chosen = parse_policy(policy or config.policy, config.link, config.workers)
    seconds = config.grace_seconds if grace is None else parse_duration(grace)
    repacked = 0
    with context.open(write=True) as store:
        result = collect(store, GcOptions(seconds, dry_run))
        if repack:
            total = sum(pack.bytes for pack in store.catalog.packs())
            with context.progress("repacking", total) as progress:
                repacked = repack_all(store, chosen, config.workers, progress)
    took = monotonic() - started
    if as_json:
        output.print_json(
            {
                "dry_run": dry_run,
                "blocks_removed": result.blocks_removed,
                "packs_removed": result.packs_removed,
                "packs_rewritten": result.packs_rewritten,
                "freed_bytes": result.freed_bytes,
                "repacked_bytes": repacked,
                "kept_by_grace": result.kept_by_grace,
                "kept_by_lease": 0,  # leases come with commands that need them
                "kept_in_packs": result.kept_in_packs,
                "seconds": round(took, 3),
            }
        )
        return
    would = "would be " if dry_run else ""
    rows = [(f"repacked, {chosen}", _shrank(repacked))] if repack else []
    output.facts(
        [
            (f"{would}freed", output.size(result.freed_bytes)),
            (f"{would}removed", f"{result.blocks_removed} blocks, {result.packs_removed} packs"),
            (f"{would}rewritten", f"{result.packs_rewritten} packs"),
            ("kept by grace", f"{result.kept_by_grace} blocks"),
            ("kept in packs that mostly live", f"{result.kept_in_packs} blocks"),
            *rows,
            ("time", f"{took:.2f} s"),
        ]
    )


def _shrank(freed: int) -> str:
    return f"{output.size(abs(freed))} {'less' if freed >= 0 else 'more'}"


@click.command()
@click.option("--read-data", is_flag=True, help="Read and verify every byte of every pack.")
@click.option("--repair", is_flag=True, help="Rewrite a damaged journal, rebuild a wrong catalog.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.pass_obj
def check(context: Context, read_data: bool, repair: bool, as_json: bool) -> None:
    """Audit counts, indexes, names, data.

    Exits with 4 when something is damaged.
    """
    from icefloe.gc.audit import check as audit_store
    from icefloe.gc.audit import repair as repair_store

    with context.open(write=repair, repair=repair) as store:
        total = sum(pack.bytes for pack in store.catalog.packs())
        with context.progress("reading", total if read_data else 0) as progress:
            audit = audit_store(store, read_data=read_data, progress=progress)
        if repair:
            audit = repair_store(store, audit)
    if as_json:
        output.print_json(
            {
                "ok": audit.ok,
                "images": audit.images,
                "blocks": audit.blocks,
                "packs": audit.packs,
                "problems": [
                    {"kind": p.kind, "what": p.what, "waste": p.waste, "repaired": p.repaired}
                    for p in audit.problems
                ],
            }
        )
    else:
        print(f"{audit.images} images, {audit.blocks} blocks, {audit.packs} packs")
        for problem in audit.problems:
            weight = "waste" if problem.waste else "DAMAGE"
            mended = " (repaired)" if problem.repaired else ""
            print(output.printable(f"{weight}  {problem.kind}: {problem.what}{mended}"))
        print("ok" if audit.ok else "damaged")
    if not audit.ok:
        raise click.exceptions.Exit(4)
