"""`batchtp submit`: send a file to the queue and return once it is accepted."""

from __future__ import annotations

from typing import Annotated

import typer

from batchtp.cli import options
from batchtp.cli.connection import client_for
from batchtp.cli.failures import handled
from batchtp.cli.output import emit_json, emit_text, note
from batchtp.cli.shown import status_document


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(submit)


@handled
def submit(
    file: Annotated[str, typer.Argument(help="JSON lines; - for standard input.")],
    model: options.Model = None,
    batch_id: Annotated[
        str | None,
        typer.Option("--batch-id", help="Your own id: sending again is safe.", show_default=False),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse the file if any line is bad.")
    ] = False,
    text: Annotated[bool, typer.Option("--text", help="Every line is a plain prompt.")] = False,
    priority: Annotated[int, typer.Option("--priority", help="Higher runs first.")] = 0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait for acceptance.")] = False,
    home: options.Home = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Submit a file of prompts; print the batch's id. Bad lines become error rows."""
    settings = options.settings_for(debug, home=home)
    with client_for(settings) as client:
        batch = client.submit(
            file,
            model=options.served_name(settings, model),
            batch_id=batch_id,
            strict=strict,
            text=text,
            wait=not no_wait,
            priority=priority,
        )
        if as_json:
            emit_json({"batch_id": batch.id} if no_wait else status_document(batch.status()))
        else:
            emit_text(batch.id)
            note(f"`batchtp watch {batch.id}` follows it.")
