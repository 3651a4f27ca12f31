"""What a command needs to reach the services, and to let go of them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from batchtp import services
from batchtp.client import Client
from batchtp.settings import Settings
from batchtp.store import migrate


@contextmanager
def connected(settings: Settings) -> Iterator[Settings]:
    """The settings with the URLs of running services.

    Embedded ones are started if need be, brought to this version's schema, and stopped at the end
    if nobody else uses them. Others are migrated by `batchtp migrate` alone.
    """
    endpoints = services.ensure(settings)
    try:
        if not settings.database_url:
            migrate.upgrade(endpoints.database_url)
        yield replace(settings, **asdict(endpoints))
    finally:
        services.release(settings)


@contextmanager
def client_for(settings: Settings) -> Iterator[Client]:
    """A client of those services."""
    with connected(settings) as reachable, Client(reachable) as client:
        yield client
