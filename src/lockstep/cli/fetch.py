"""`lockstep fetch`: download a public data set, on a machine that has internet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import answer
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.data.sets import DataSet


def fetch_command(
    names: Annotated[list[str] | None, typer.Argument(help="wikitext2, mnist, cifar10: one or more.")] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="Another place for the files: a URL, or a folder that holds them.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the data sets and which of them are here.")] = False,
    as_json: opt.Json = False,
) -> int:
    """Download a public data set into the cache, on a login node before compute nodes that have no internet."""
    from lockstep.data import sets

    if list_:
        _list_sets(as_json)
        return 0
    if not names:
        raise UserError("it is not said what to fetch", f"name one of {', '.join(sets.SETS)}; --list shows them")
    for dataset in [sets.find_set(name) for name in names]:
        is_new = _fetch(sets.mirrored(dataset, from_) if from_ else dataset, as_json)
        folder, size = sets.folder_of(dataset, sets.cache_folder()), dataset.size
        if as_json:
            answer({"name": dataset.name, "folder": str(folder), "bytes": size, "downloaded": is_new})
        else:
            state = "is now" if is_new else "was already"
            print(f"{dataset.name} {state} in {folder}, every digest right ({_mb(size)})")
    return 0


def _fetch(dataset: DataSet, as_json: bool) -> bool:
    from rich.console import Console as Terminal
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from lockstep.data import sets

    terminal = Terminal(stderr=as_json)
    amounts = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_interactive) as bar:
        total = sum(download.file.size for download in dataset.downloads)
        task = bar.add_task(dataset.name, total=total)
        return sets.fetch(dataset, sets.cache_folder(), lambda count: bar.advance(task, count))


def _list_sets(as_json: bool) -> None:
    from lockstep.data import sets

    cache = sets.cache_folder()
    rows = [
        {
            "name": dataset.name,
            "title": dataset.title,
            "licence": dataset.licence,
            "bytes": dataset.size,
            "cached": sets.is_cached(dataset, cache),
            "folder": str(sets.folder_of(dataset, cache)),
            "source": dataset.downloads[0].url.rpartition("/")[0],
        }
        for dataset in sets.SETS.values()
    ]
    if as_json:
        answer(rows)
        return
    print(f"cache folder: {cache} ({sets.CACHE} names another)")
    for dataset, row in zip(sets.SETS.values(), rows, strict=True):
        state = f"here: {row['folder']}" if row["cached"] else f"not here: lockstep fetch {row['name']}"
        print(f"\n{row['name']}: {row['title']}")
        print(f"  {_mb(dataset.size)} from {row['source']}, licence: {row['licence']}")
        print(f"  {state}")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
