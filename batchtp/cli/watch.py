"""`batchtp watch`: follow a batch until it ends."""

from __future__ import annotations

import time

import typer

from batchtp.cli import options
from batchtp.cli.batches import BatchId
from batchtp.cli.connection import client_for
from batchtp.cli.failures import handled
from batchtp.cli.output import emit_json, emit_table
from batchtp.cli.progress import ProgressView, show_progress
from batchtp.cli.shown import status_document, status_rows
from batchtp.core import BatchState

_POLL_SECS = 0.5
_SOME_FAILED = 3


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(watch)


@handled
def watch(
    batch_id: BatchId,
    home: options.Home = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Follow a batch until it ends. With --json one document a change.

    Exit code 3: it ended, but some requests failed or it did not complete.
    """
    with client_for(options.settings_for(debug, home=home)) as client, ProgressView() as view:
        batch = client.batch(batch_id)
        last = None
        while True:
            found = batch.status()
            if as_json and found != last:
                emit_json(status_document(found))
            elif not as_json:
                show_progress(view, client, found)
            last = found
            if found.state.final:
                break
            time.sleep(_POLL_SECS)
    if not as_json:
        emit_table(["what", "value"], status_rows(found))
    if found.state is not BatchState.COMPLETED or found.counts.failed:
        raise typer.Exit(_SOME_FAILED)
