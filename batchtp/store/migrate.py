"""Bringing a database's schema up to this version, with Alembic."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError

from batchtp.errors import SchemaError
from batchtp.store.database import Store

# Any number of its own: two starters must not both migrate.
_LOCK = 0x62746D67


def upgrade(database_url: str) -> None:
    """Run the migrations that are missing; one process at a time.

    Raises DatabaseUnavailableError, or SchemaError when the database is newer than this program.
    """
    config = _config()
    with Store(database_url) as store, store.transaction() as connection:
        connection.execute(sa.text("select pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise SchemaError(
                f"The database's schema is not one this version knows ({error}). Use the version "
                "of batchtp that made it, or a newer one."
            ) from error


def check(store: Store) -> None:
    """Raise SchemaError unless the database is at this version's schema."""
    wanted = ScriptDirectory.from_config(_config()).get_current_head()
    with store.transaction() as connection:
        found = MigrationContext.configure(connection).get_current_revision()
    if found != wanted:
        raise SchemaError(
            f"The database's schema is at {found or 'nothing'}, this version needs {wanted}: "
            "run `batchtp migrate`."
        )


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_folder()).replace("%", "%%"))
    return config


def _folder() -> Path:
    """Beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parents[1]
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").exists():
            return folder
    raise SchemaError("This installation of batchtp has no migrations; install it again.")
