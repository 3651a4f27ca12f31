"""`batchtp config`: every setting, its value and where it came from."""

from __future__ import annotations

from dataclasses import fields

import typer

from batchtp.cli import options
from batchtp.cli.failures import handled
from batchtp.cli.output import emit_json, emit_table
from batchtp.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(config)


@handled
def config(
    home: options.Home = None, as_json: options.Json = False, debug: options.Debug = False
) -> None:
    """Show every setting, its value and where it came from. Credentials are masked."""
    settings = options.settings_for(debug, home=home)
    specs = [spec for spec in fields(Settings) if spec.name != "sources"]
    if as_json:
        emit_json(
            {
                spec.name: {
                    "value": _plain(settings, spec.name),
                    "source": settings.sources[spec.name],
                    "about": spec.metadata["doc"],
                }
                for spec in specs
            }
        )
        return
    emit_table(
        ["setting", "value", "source"],
        [(s.name, settings.shown(s.name) or "(empty)", settings.sources[s.name]) for s in specs],
    )


def _plain(settings: Settings, name: str) -> object:
    value = getattr(settings, name)
    return settings.shown(name) if isinstance(value, str) else value
