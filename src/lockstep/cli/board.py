"""`lockstep board`: the page of a run in a browser, while the run goes on."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer


def board_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several are compared.")],
    host: Annotated[
        str, typer.Option(help="Where to listen. On others than this machine's own, the address holds a secret.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Default: 8600, or the next that is free; 0: any.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
) -> int:
    """Show runs in a browser as they go on; read-only, until Ctrl-C."""
    from rich.console import Console as Terminal

    from lockstep.page.serve import follow, in_url, open_board
    from lockstep.record.folder import existing_runs

    terminal = Terminal(highlight=False)
    folders = existing_runs(runs)
    with open_board(follow(folders), host, port) as board:
        with terminal.status(f"reading {', '.join(map(str, folders))}"):
            board.page.newest()
        terminal.print(f"{', '.join(map(str, folders))}: {board.url}", markup=False, soft_wrap=True)
        if board.is_loopback and host not in ("localhost", board.address):
            text = f"{host} is {board.address} here, which only this machine reaches: --host 0.0.0.0 lets others in"
            terminal.print(text, markup=False, soft_wrap=True)
        if os.environ.get("SSH_CONNECTION") and board.is_loopback:
            tunnel = f"ssh -N -L {board.port}:{in_url(board.address)}:{board.port} {socket.gethostname()}"
            terminal.print(f"from your own machine: {tunnel}, then open it there", markup=False, soft_wrap=True)
        terminal.print("Ctrl-C ends it; the run goes on", style="dim")
        if open_:
            import webbrowser

            webbrowser.open(board.url)
        try:
            board.serve_forever()
        except KeyboardInterrupt:
            return 130
    return 0
