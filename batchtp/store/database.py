"""The connection to Postgres, and its errors by our names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import psycopg
import sqlalchemy as sa
from sqlalchemy import exc

from batchtp.errors import DatabaseUnavailableError, SchemaError
from batchtp.settings import mask_url

# A dead server must not hold a worker: connecting, and a silent network, have bounds of their own.
_CONNECT_ARGS = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "application_name": "batchtp",
    "options": "-c lock_timeout=30s -c statement_timeout=120s -c timezone=UTC",
}

# psycopg's own too: COPY goes past SQLAlchemy.
_AWAY = (
    exc.OperationalError,
    exc.InterfaceError,
    exc.TimeoutError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
)


class Store:
    """A pool of connections to one database. Threads may share it; processes may not."""

    def __init__(self, database_url: str) -> None:
        self.url = database_url
        self.engine = sa.create_engine(
            database_url,
            connect_args=_CONNECT_ARGS,
            # Errors are logged; prompts are not.
            hide_parameters=True,
            pool_pre_ping=True,
            pool_size=8,
            max_overflow=24,
            pool_timeout=30,
        )

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give every connection back to the server."""
        self.engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """A transaction that commits when the block ends and rolls back when it raises.

        Raises DatabaseUnavailableError when the server does not answer, SchemaError when a table
        is missing.
        """
        try:
            with self.engine.begin() as connection:
                yield connection
        except _AWAY as error:
            raise self._unavailable(error) from error
        except exc.ProgrammingError as error:
            if getattr(error.orig, "sqlstate", None) in ("42P01", "42703"):
                raise SchemaError(
                    f"The schema of {mask_url(self.url)} is not this version's: run "
                    f"`batchtp migrate`. ({_first_line(error)})"
                ) from error
            raise

    def health(self) -> str:
        """The server's version. Raises DatabaseUnavailableError."""
        with self.transaction() as connection:
            version: str = connection.execute(sa.text("show server_version")).scalar_one()
        return f"PostgreSQL {version}"

    def _unavailable(self, error: Exception) -> DatabaseUnavailableError:
        return DatabaseUnavailableError(
            f"Postgres at {mask_url(self.url)} does not answer: {_first_line(error)}"
        )


def _first_line(error: Exception) -> str:
    cause = getattr(error, "orig", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
