"""`batchtp model inspect`: what a checkpoint is, and which TP degrees fit it."""

from __future__ import annotations

from typing import Annotated

import typer

from batchtp.cli import options
from batchtp.cli.failures import handled
from batchtp.cli.output import emit_json, emit_table
from batchtp.model.inspect import inspect_model
from batchtp.model.resolve import resolve_model


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(no_args_is_help=True, help="Look at model files.")
    group.command("inspect")(inspect)
    app.add_typer(group, name="model")


@handled
def inspect(
    path: Annotated[str, typer.Argument(help="Directory, GGUF file, hub id or demo name.")],
    home: options.Home = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show a checkpoint's format, layers, bytes and the TP degrees that fit. Loads no weight."""
    settings = options.settings_for(debug, home=home)
    facts = inspect_model(resolve_model(path, settings.home_path).path)
    if as_json:
        emit_json(facts)
        return
    emit_table(["what", "value"], [(k.replace("_", " "), v) for k, v in facts.items()])
