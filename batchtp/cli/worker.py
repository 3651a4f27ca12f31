"""`batchtp worker`: one worker with its tensor-parallel group, until it is told to stop."""

from __future__ import annotations

from typing import Annotated

import typer

from batchtp.cli import options
from batchtp.cli.connection import connected
from batchtp.cli.failures import handled
from batchtp.cli.output import note
from batchtp.settings import mask_url


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(worker)


@handled
def worker(
    model: options.Model = None,
    tp: options.Tp = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantize: options.Quantize = None,
    served_name: Annotated[
        str | None,
        typer.Option("--served-name", help="Name clients use for it.", show_default=False),
    ] = None,
    home: options.Home = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log lines as JSON.")] = False,
    debug: options.Debug = False,
) -> None:
    """Serve one model: take chunks from the queue, generate, write completions.

    SIGTERM or Ctrl-C finishes what runs within the grace time; a second one ends at once.
    """
    # Here, because it takes a moment that no other command should wait for.
    from batchtp.worker.app import run_worker

    settings = options.settings_for(
        debug,
        home=home,
        model=model,
        tp=tp,
        device=device,
        dtype=dtype,
        quantize=quantize,
        served_name=served_name,
        log_format="json" if as_json else None,
    )
    with connected(settings) as reachable:
        note(f"Broker {mask_url(reachable.redis_url)}")
        note(f"Database {mask_url(reachable.database_url)}")
        run_worker(reachable)
