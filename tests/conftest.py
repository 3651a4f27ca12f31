"""Fixtures for every test: one real Postgres and Valkey a session, isolation a test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from batchtp import services
from batchtp.services import Endpoints
from batchtp.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("BATCHTP_") and name not in {"BATCHTP_KERNELS"}:
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """Real servers on a directory of this session, started once."""
    # A short path: sockets live under it.
    settings = load_settings({"home": str(tmp_path_factory.mktemp("s"))}, environ={})
    yield services.ensure(settings)
    services.release(settings)


@pytest.fixture
def key_prefix() -> str:
    """A prefix for Redis keys and queues that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def _template_database(endpoints: Endpoints) -> str:
    from batchtp.store import migrate

    _administer(endpoints, "create database migrated_template")
    migrate.upgrade(_with_database(endpoints.database_url, "migrated_template"))
    return "migrated_template"


@pytest.fixture
def empty_database_url(endpoints: Endpoints) -> Iterator[str]:
    """A database of this test's own, with no schema in it."""
    yield from _database(endpoints, "template1")


@pytest.fixture
def database_url(endpoints: Endpoints, _template_database: str) -> Iterator[str]:
    """A migrated database of this test's own."""
    yield from _database(endpoints, _template_database)


@pytest.fixture
def settings(endpoints: Endpoints, database_url: str, key_prefix: str, tmp_path: Path) -> Settings:
    """Settings for a test with services: own database, own key prefix, own home."""
    flags = {
        "home": str(tmp_path / "home"),
        "redis_url": endpoints.redis_url,
        "database_url": database_url,
        "key_prefix": key_prefix,
    }
    return load_settings(flags, environ={})


@pytest.fixture
def settings_with(settings: Settings) -> Callable[..., Settings]:
    """`settings` with some values replaced."""
    return lambda **changes: replace(settings, **changes)


def _database(endpoints: Endpoints, template: str) -> Iterator[str]:
    name = f"t{uuid.uuid4().hex[:12]}"
    _administer(endpoints, f"create database {name} template {template}")
    yield _with_database(endpoints.database_url, name)
    _administer(endpoints, f"drop database {name} with (force)")


def _administer(endpoints: Endpoints, statement: str) -> None:
    url = endpoints.database_url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


def _with_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
