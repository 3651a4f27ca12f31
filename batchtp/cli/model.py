"""`batchtp model inspect`: what a checkpoint is, and which TP degrees fit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from batchtp.cli import options
from batchtp.cli.failures import handled
from batchtp.cli.output import emit_json, emit_table, emit_text
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
    found = inspect_model(resolve_model(path, settings.home_path).path)
    if as_json:
        emit_json({**found.facts, "shares": [asdict(shares) for shares in found.shares]})
        return
    emit_table(["what", "value"], [(k.replace("_", " "), v) for k, v in found.facts.items()])
    emit_text("\nEach rank's share, rank 0 first:")
    emit_table(
        ["tp", "query heads", "KV heads", "MLP features", "vocabulary", "MiB"],
        [
            (
                shares.tp,
                _each(shares.query_heads),
                _each(shares.kv_heads),
                _each(shares.mlp_features),
                _each(shares.vocabulary),
                _each(tuple(round(size / 2**20, 1) for size in shares.nbytes)),
            )
            for shares in found.shares
        ],
    )


def _each(values: Sequence[float]) -> str:
    """A value for every rank; one of them where all are the same."""
    if len(set(values)) == 1:
        return f"{values[0]} each" if len(values) > 1 else str(values[0])
    return " ".join(map(str, values))
