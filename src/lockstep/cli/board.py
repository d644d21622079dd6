"""`lockstep board`: the page of a run in a browser, while the run goes on."""

from __future__ import annotations

import os
import socket
from typing import Annotated

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import open_terminal, say


def board_command(
    runs: opt.Runs,
    host: Annotated[
        str, typer.Option(help="Where to listen. On others than this machine's own, the address holds a secret.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Default: 8600, or the next that is free; 0: any.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
) -> int:
    """Show runs in a browser as they go on; read-only, until Ctrl-C."""
    from lockstep.page.serve import follow, in_url, open_board
    from lockstep.record.folder import existing_runs

    terminal = open_terminal()
    folders = existing_runs(runs)
    with open_board(follow(folders), host, port) as board:
        with terminal.status(f"reading {', '.join(map(str, folders))}"):
            board.page.newest()
        say(terminal, f"{', '.join(map(str, folders))}: {board.url}")
        if board.is_loopback and host not in ("localhost", board.address):
            text = f"{host} is {board.address} here, which only this machine reaches: --host 0.0.0.0 lets others in"
            say(terminal, text)
        if os.environ.get("SSH_CONNECTION") and board.is_loopback:
            tunnel = f"ssh -N -L {board.port}:{in_url(board.address)}:{board.port} {socket.gethostname()}"
            say(terminal, f"from your own machine: {tunnel}, then open it there")
        terminal.print("Ctrl-C ends it; the run goes on", style="dim")
        if open_:
            import webbrowser

            webbrowser.open(board.url)
        try:
            board.serve_forever()
        except KeyboardInterrupt:
            return 130
    return 0
