"""fagen cache: what is in the cache of compiled kernels, and how to make room."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from . import common

if TYPE_CHECKING:
    from ..cache import Cache, Entry


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """The cache of compiled kernels (FAGEN_CACHE_DIR, else ~/.cache/fagen; at most FAGEN_CACHE_MAX_BYTES)."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


@command.command("ls")
@common.json_option
def ls(as_json: bool) -> None:
    """List the cached kernels, the most recently used first."""
    from rich.table import Table

    store = _store()
    entries = store.ls()
    if as_json:
        common.write_json({"directory": str(store.root), "max_bytes": store.max_bytes, "entries": [_facts(e) for e in entries]})
        return
    table = Table("kernel", "target", "compiler", "bytes", "last used", "key")
    for e in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(e.used))
        table.add_row(*(e.label.get(n, "?") for n in ("name", "arch", "compiler")), str(e.bytes), used, e.key[:12])
    if entries:
        common.write(table)
    common.write(f"{store.root}: {_amount(entries)} of at most {store.max_bytes} bytes")


@command.command("prune")
@click.option("--max-bytes", type=click.IntRange(0), help="Keep at most this much. Default: the cache's bound.")
@common.json_option
def prune(max_bytes: int | None, as_json: bool) -> None:
    """Remove the kernels unused for longest, until the rest fits."""
    store = _store()
    _removed(store, store.prune(max_bytes), as_json)


@command.command("clear")
@common.json_option
def clear(as_json: bool) -> None:
    """Remove every cached kernel."""
    store = _store()
    _removed(store, store.clear(), as_json)


def _store() -> Cache:
    from ..cache import default
    from ..errors import InputError

    try:
        return default()
    except OSError as e:
        raise InputError("cache", f"there is no place for one: {e.strerror or e}") from e


def _removed(store: Cache, gone: tuple[Entry, ...], as_json: bool) -> None:
    if as_json:
        common.write_json({"directory": str(store.root), "removed": [_facts(e) for e in gone]})
    else:
        common.write(f"{store.root}: removed {_amount(gone)}")


def _amount(entries: tuple[Entry, ...]) -> str:
    return f"{len(entries)} kernel{'s' if len(entries) != 1 else ''}, {sum(e.bytes for e in entries)} bytes"


def _facts(entry: Entry) -> dict[str, Any]:
    return {"key": entry.key, "bytes": entry.bytes, "used": entry.used, **entry.label}
