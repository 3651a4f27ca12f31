"""`batchtp up`, `down` and `migrate`: the embedded services and the database schema."""

from __future__ import annotations

from dataclasses import asdict

import typer

from batchtp import services
from batchtp.cli import options
from batchtp.cli.failures import handled
from batchtp.cli.output import emit_json, emit_text
from batchtp.errors import UsageError
from batchtp.settings import Settings, mask_url
from batchtp.store import migrate as schema


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (up, down, migrate):
        app.command()(command)


@handled
def up(
    home: options.Home = None, as_json: options.Json = False, debug: options.Debug = False
) -> None:
    """Start the embedded Postgres and Valkey, migrate, and leave them running."""
    settings = options.settings_for(debug, home=home)
    _refuse_external(settings)
    endpoints = services.up(settings)
    schema.upgrade(endpoints.database_url)
    if as_json:
        emit_json(asdict(services.status(settings)))
        return
    emit_text(f"Postgres and Valkey are up ({settings.home_path}); `batchtp down` stops them.")


@handled
def down(
    home: options.Home = None, as_json: options.Json = False, debug: options.Debug = False
) -> None:
    """Stop the embedded Postgres and Valkey. Data stays."""
    settings = options.settings_for(debug, home=home)
    _refuse_external(settings)
    stopped = services.down(settings)
    if as_json:
        emit_json({"stopped": stopped})
        return
    emit_text("Stopped." if stopped else "They were not running.")


@handled
def migrate(
    home: options.Home = None, as_json: options.Json = False, debug: options.Debug = False
) -> None:
    """Bring the database schema up to date."""
    settings = options.settings_for(debug, home=home)
    url = services.ensure(settings).database_url
    try:
        schema.upgrade(url)
    finally:
        services.release(settings)
    if as_json:
        emit_json({"database_url": mask_url(url), "migrated": True})
        return
    emit_text(f"The schema of {mask_url(url)} is up to date.")


def _refuse_external(settings: Settings) -> None:
    if settings.redis_url:
        raise UsageError(
            f"Redis and Postgres are set ({settings.sources['redis_url']}), so there are no "
            "embedded services to start or stop."
        )
