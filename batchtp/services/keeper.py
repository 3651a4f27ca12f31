"""The process that owns the embedded servers: `python -m batchtp.services.keeper HOME [--stay]`.

It holds the data directory's owner lock for its whole life, restarts a server that dies, and stops
both when nobody holds the users lock any more. If it is killed, the servers get their stop signal
from the kernel. One JSON line on standard output says how the start went.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from batchtp.errors import BatchtpError, EmbeddedServiceError
from batchtp.services.layout import Layout
from batchtp.services.locks import FileLock
from batchtp.services.servers import (
    START_SECS,
    ServerSpec,
    end_leftovers,
    rotate,
    specs,
    wait_until_answers,
)

# A server that dies more often than this in ten minutes has a reason that a restart does not cure.
_MAX_RESTARTS = 5
_RESTART_WINDOW_SECS = 600.0

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1}


class Keeper:
    """Runs the servers until told to stop, or until the last user is gone."""

    def __init__(self, layout: Layout, stay: bool) -> None:
        self._layout = layout
        self._stay = stay
        self._running: dict[ServerSpec, subprocess.Popen[bytes]] = {}
        self._restarts: list[float] = []
        self._users = FileLock(layout.lock("users"))

    def start(self) -> None:
        """Start both servers and wait until they answer. Raises EmbeddedServiceError."""
        both = specs(self._layout)
        for spec in both:
            count = end_leftovers(spec.data)
            if count:
                _log(f"ended {count} processes of an earlier {spec.name}")
            rotate(spec.log)
        for spec in both:
            self._running[spec] = spec.start()
        for spec in both:
            wait_until_answers(spec, self._running[spec], START_SECS)
        self._write_state()

    def serve(self) -> None:
        """Return when it is time to stop."""
        if not self._stay:
            threading.Thread(target=self._watch_users, daemon=True).start()
        while True:
            number = signal.sigwait(_SIGNALS)
            if number in (signal.SIGTERM, signal.SIGINT):
                return
            if number == signal.SIGUSR1:
                self._stay = True
                self._write_state()
            else:
                self._restart_dead()

    def stop(self) -> None:
        """Stop both servers; new users wait at the lock until we are gone."""
        self._layout.state.unlink(missing_ok=True)
        for spec, process in reversed(self._running.items()):
            spec.stop(process)

    def _watch_users(self) -> None:
        self._users.acquire(shared=False)
        if self._stay:
            self._users.release()
            return
        _log("the last user is gone")
        os.kill(os.getpid(), signal.SIGTERM)

    def _restart_dead(self) -> None:
        for spec, process in list(self._running.items()):
            if process.poll() is None:
                continue
            _log(f"{spec.name} ended (exit {process.returncode}); starting it again")
            self._count_restart(spec)
            end_leftovers(spec.data)
            self._running[spec] = spec.start()
            wait_until_answers(spec, self._running[spec], START_SECS)
            self._write_state()

    def _count_restart(self, spec: ServerSpec) -> None:
        now = time.monotonic()
        recent = [at for at in self._restarts if now - at < _RESTART_WINDOW_SECS]
        self._restarts = [*recent, now]
        if len(self._restarts) > _MAX_RESTARTS:
            raise EmbeddedServiceError(f"{spec.name} keeps dying; its log is {spec.log}.")

    def _write_state(self) -> None:
        state = {
            "keeper_pid": os.getpid(),
            "stay": self._stay,
            "urls": {spec.name: spec.url for spec in self._running},
            "pids": {spec.name: process.pid for spec, process in self._running.items()},
            "data": {spec.name: str(spec.data) for spec in self._running},
        }
        partial = self._layout.state.with_suffix(".partial")
        partial.write_text(json.dumps(state), encoding="utf-8")
        partial.replace(self._layout.state)


def main(arguments: list[str]) -> int:
    """Run as a keeper; the exit code."""
    layout = Layout(Path(arguments[0]))
    owner = FileLock(layout.lock("owner"))
    # Those who only look hold it for a moment.
    if not owner.acquire(timeout_secs=2.0):
        _report(error="another keeper runs on this data directory")
        return 1
    owner.write(str(os.getpid()))
    os.chdir("/")
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    keeper = Keeper(layout, stay="--stay" in arguments)
    try:
        keeper.start()
        _report()
        keeper.serve()
    except (BatchtpError, OSError, subprocess.SubprocessError) as error:
        _log(str(error))
        _report(error=str(error))
        return 1
    finally:
        keeper.stop()
    return 0


def _report(error: str | None = None) -> None:
    if sys.stdout.closed:
        return
    sys.stdout.write(json.dumps({"error": error}) + "\n")
    sys.stdout.close()


def _log(message: str) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    sys.stderr.write(f"{stamp} keeper {os.getpid()}: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
