"""How a process gets at the embedded services: attach to those that run, or start them."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchtp.errors import EmbeddedServiceError
from batchtp.services.layout import Layout, recorded_placement
from batchtp.services.locks import FileLock, is_held
from batchtp.services.servers import START_SECS, end_leftovers, log_tail
from batchtp.settings import Settings

# Longer than the keeper's own budget for both servers and a first initdb.
_ATTACH_SECS = START_SECS * 3
_STOP_SECS = 90.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where Redis (or Valkey) and Postgres are."""

    redis_url: str
    database_url: str


@dataclass(frozen=True, slots=True)
class ServicesStatus:
    """The embedded services as they stand. `stays`: until `down`, not until the last user goes."""

    running: bool
    stays: bool = False
    keeper_pid: int | None = None
    redis_url: str = ""
    database_url: str = ""
    pids: tuple[tuple[str, int], ...] = ()
    data: tuple[tuple[str, str], ...] = ()


# One shared lock a data directory, held until `release` or the end of the process: the kernel
# drops it however we die.
_held: dict[Path, FileLock] = {}
_started: set[Path] = set()


def ensure(settings: Settings) -> Endpoints:
    """The services to use: the URLs of the settings, else the embedded ones, started if need be.

    The embedded ones stay up at least until this process ends or calls `release`.
    Raises EmbeddedServiceError when they cannot be started.
    """
    if settings.redis_url and settings.database_url:
        return Endpoints(settings.redis_url, settings.database_url)
    return _attach(Layout(settings.home_path), stay=False)


def up(settings: Settings) -> Endpoints:
    """Start the embedded services and leave them running until `down`."""
    layout = Layout(settings.home_path)
    endpoints = _attach(layout, stay=True)
    state = _read_state(layout)
    if state and not state["stay"]:
        os.kill(state["keeper_pid"], signal.SIGUSR1)
        _wait(lambda: bool((_read_state(layout) or {}).get("stay")), 10.0, "The keeper")
    _drop(layout)
    return endpoints


def release(settings: Settings) -> None:
    """Say that this process needs the services no more; if it was the last, wait for their end."""
    layout = Layout(settings.home_path)
    if layout.home not in _held:
        return
    state = _read_state(layout)
    # Held to the end, so that nobody attaches to servers that are stopping.
    alone = _held[layout.home].acquire(timeout_secs=0)
    try:
        if alone and state and not state["stay"]:
            os.kill(state["keeper_pid"], signal.SIGTERM)
            _wait_for_end(layout, state["keeper_pid"])
    finally:
        _drop(layout)


def down(settings: Settings) -> bool:
    """Stop the embedded services whoever uses them; False when none ran."""
    layout = Layout(settings.home_path)
    if not layout.folder.exists():
        return False
    owner = FileLock(layout.lock("owner"))
    if owner.acquire(timeout_secs=0):
        try:
            return _end_leftovers(layout)
        finally:
            owner.release()
    owner.release()
    pid = int(owner.read())
    os.kill(pid, signal.SIGTERM)
    _wait_for_end(layout, pid)
    return True


def started_here(settings: Settings) -> bool:
    """Whether this process started the embedded services it holds: nobody used them before."""
    return settings.home_path in _started


def status(settings: Settings) -> ServicesStatus:
    """How the embedded services of this data directory stand. Starts nothing."""
    layout = Layout(settings.home_path)
    state = _read_state(layout)
    if state is None:
        return ServicesStatus(running=False)
    return ServicesStatus(
        running=True,
        stays=state["stay"],
        keeper_pid=state["keeper_pid"],
        redis_url=state["urls"]["valkey"],
        database_url=state["urls"]["postgres"],
        pids=tuple(state["pids"].items()),
        data=tuple(state["data"].items()),
    )


def _end_leftovers(layout: Layout) -> bool:
    placement = recorded_placement(layout)
    folders = [layout.valkey_data, *([placement.data] if placement else [])]
    return sum([end_leftovers(folder) for folder in folders if folder.exists()]) > 0


def _attach(layout: Layout, stay: bool) -> Endpoints:
    layout.make()
    if layout.home not in _held:
        lock = FileLock(layout.lock("users"))
        # A keeper that is stopping holds it until it is gone.
        if not lock.acquire(shared=True, timeout_secs=_STOP_SECS):
            lock.release()
            raise EmbeddedServiceError(
                f"The services of {layout.home} have been stopping too long."
            )
        _held[layout.home] = lock
    try:
        return _find_or_start(layout, stay)
    except BaseException:
        _drop(layout)
        raise


def _find_or_start(layout: Layout, stay: bool) -> Endpoints:
    start = FileLock(layout.lock("start"))
    if not start.acquire(timeout_secs=_ATTACH_SECS):
        raise EmbeddedServiceError(f"Another process is starting the services of {layout.home}.")
    try:
        state = _read_state(layout)
        if state is None:
            # A keeper without a state is stopping: starts are one at a time.
            owner = layout.lock("owner")
            _wait(lambda: not is_held(owner), _STOP_SECS, "The keeper that is stopping")
            _start_keeper(layout, stay)
            _started.add(layout.home)
            state = _read_state(layout)
    finally:
        start.release()
    if state is None:
        raise EmbeddedServiceError(
            f"The services of {layout.home} stopped again at once: "
            f"{log_tail(layout.logs / 'keeper.log')}"
        )
    return Endpoints(state["urls"]["valkey"], state["urls"]["postgres"])


def _start_keeper(layout: Layout, stay: bool) -> None:
    reader, writer = os.pipe()
    log = str(layout.logs / "keeper.log")
    command = [sys.executable, "-m", "batchtp.services.keeper", str(layout.home)]
    try:
        os.posix_spawn(
            sys.executable,
            [*command, "--stay"] if stay else command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, writer, 1),
                (os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            ],
            setsid=True,
        )
    finally:
        os.close(writer)
    try:
        report = _read_report(reader)
    finally:
        os.close(reader)
    if report is None:
        raise EmbeddedServiceError(f"The keeper did not start: {log_tail(Path(log))}")
    if report["error"]:
        raise EmbeddedServiceError(report["error"])


def _read_report(reader: int) -> dict[str, Any] | None:
    deadline = time.monotonic() + _ATTACH_SECS
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(reader, 65536) if ready else b""
        if not piece:
            return None
        data += piece
    return dict(json.loads(data))


def _read_state(layout: Layout) -> dict[str, Any] | None:
    """What the living keeper says; None when there is none or it is starting or stopping."""
    if not is_held(layout.lock("owner")):
        return None
    try:
        return dict(json.loads(layout.state.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _drop(layout: Layout) -> None:
    _started.discard(layout.home)
    lock = _held.pop(layout.home, None)
    if lock is not None:
        lock.release()


def _wait_for_end(layout: Layout, keeper_pid: int) -> None:
    _wait(lambda: not is_held(layout.lock("owner")), _STOP_SECS, "The keeper", keeper_pid)
    try:
        # It may be a child of ours; then its entry goes only when we ask.
        os.waitpid(keeper_pid, 0)
    except ChildProcessError:
        return


def _wait(done: Callable[[], bool], timeout_secs: float, who: str, pid: int | None = None) -> None:
    deadline = time.monotonic() + timeout_secs
    while not done():
        if time.monotonic() > deadline:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            raise EmbeddedServiceError(f"{who} did not answer in {timeout_secs:.0f} s.")
        time.sleep(0.02)
