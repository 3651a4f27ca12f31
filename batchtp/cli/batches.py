"""`batchtp status`, `list`, `results` and `cancel`: batches that were submitted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from batchtp.cli import options
from batchtp.cli.connection import client_for
from batchtp.cli.failures import handled
from batchtp.cli.output import emit_json, emit_table, emit_text, note
from batchtp.cli.shown import status_document, status_rows
from batchtp.cli.written import check_writable, write_results

BatchId = Annotated[str, typer.Argument(help="The batch's id.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, results, cancel):
        app.command()(command)
    app.command("list")(list_batches)


@handled
def status(
    batch_id: BatchId,
    home: options.Home = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show how a batch stands."""
    with client_for(options.settings_for(debug, home=home)) as client:
        found = client.batch(batch_id).status()
    if as_json:
        emit_json(status_document(found))
    else:
        emit_table(["what", "value"], status_rows(found))


@handled
def list_batches(
    limit: Annotated[int, typer.Option("--limit", help="The newest so many.", min=1)] = 20,
    home: options.Home = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List batches, the newest first."""
    with client_for(options.settings_for(debug, home=home)) as client:
        found = list(client.list(limit=limit))
    if as_json:
        emit_json([status_document(status) for status in found])
        return
    rows = [
        (s.id, s.state.value, s.model, s.counts.total, s.counts.completed, s.counts.failed)
        for s in found
    ]
    emit_table(["batch", "state", "model", "requests", "done", "failed"], rows)


@handled
def results(
    batch_id: BatchId,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Default: standard output.", show_default=False),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(
            "--errors", help="Failed rows go there; default: beside the output.", show_default=False
        ),
    ] = None,
    home: options.Home = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write a batch's rows so far, in input order, in OpenAI's batch output format.

    Without --output every row, failed ones too, goes to standard output.
    """
    settings = options.settings_for(debug, home=home)
    if output is not None:
        errors = errors or output.with_suffix(".errors.jsonl")
        check_writable(output, errors)
    with client_for(settings) as client:
        batch = client.batch(batch_id)
        state = batch.status().state
        if output is None or errors is None:
            for line in batch.output_lines():
                sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
            return
        written, failed = write_results(batch, output, errors)
    if as_json:
        emit_json(
            {
                "id": batch_id,
                "status": state.value,
                "written": written,
                "failed": failed,
                "output": str(output),
                "errors": str(errors) if failed else None,
            }
        )
        return
    emit_text(f"{written} rows in {output}" + (f", {failed} in {errors}" if failed else ""))
    if not state.final:
        note(f"The batch is still {state.value}: these are the rows so far.")


@handled
def cancel(
    batch_id: BatchId,
    home: options.Home = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Cancel a batch: what is done is kept, running requests are stopped."""
    with client_for(options.settings_for(debug, home=home)) as client:
        batch = client.batch(batch_id)
        batch.cancel()
        found = batch.status()
    if as_json:
        emit_json(status_document(found))
    else:
        emit_text(f"{found.id}: {found.state.value}")
