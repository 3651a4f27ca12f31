"""Who serves the model during `batchtp run`: a worker that runs already, else a child of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

from batchtp import services
from batchtp.client import Client
from batchtp.errors import EngineError
from batchtp.services.launch import launch_command
from batchtp.settings import PREFIX, Settings

_LOOK_SECS = 2.0
_KEPT_LOGS = 20
_LOG_TAIL_LINES = 25
# After the second SIGTERM, which ends a worker at once.
_LAST_SECS = 5.0


class LocalWorker:
    """`batchtp worker` with these settings, its output in a log under the home."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.log = _new_log(settings.home_path / "logs")
        command = [sys.executable, "-m", "batchtp", "worker"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                # A run that is killed takes its worker along, and the worker its ranks.
                launch_command("plain", signal.SIGKILL, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(settings),
                # Ctrl-C is for the run, which then stops the worker in order.
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise EngineError, with the end of the log, if the worker has ended."""
        code = self._process.poll()
        if code is None:
            return
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise EngineError(
            f"The worker ended ({how}). The end of its log, {self.log}:\n{self.tail()}"
        )

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LOG_TAIL_LINES:]) or "  (empty)"

    def stop(self, patience_secs: float) -> None:
        """End the worker: in order within the patience, then at once, then by force."""
        for number, wait_secs in (
            (signal.SIGTERM, patience_secs),
            (signal.SIGTERM, _LAST_SECS),
            (signal.SIGKILL, None),
        ):
            if self._process.poll() is None:
                self._process.send_signal(number)
            try:
                self._process.wait(wait_secs)
            except subprocess.TimeoutExpired:
                continue
            return


class Serving:
    """Sees to it that somebody serves a model, as long as `look` is called every now and then."""

    def __init__(self, client: Client, settings: Settings, model: str) -> None:
        self._client = client
        self._settings = settings
        self._model = model
        self._own: LocalWorker | None = None
        self._next_look = 0.0

    def look(self) -> bool:
        """Start a worker if nobody serves the model any more; whether it is our own.

        Raises EngineError as soon as our own has ended.
        """
        if self._own is not None:
            self._own.check()
        elif time.monotonic() >= self._next_look:
            # A worker that was killed is believed alive until its last sign of life has expired,
            # unless nobody can have been alive before us.
            alone = services.started_here(self._settings)
            if alone or not self._client.serving(self._model):
                self._own = LocalWorker(self._settings)
            self._next_look = time.monotonic() + _LOOK_SECS
        return self._own is not None

    def stop(self, patience_secs: float) -> None:
        """End our own worker, if there is one."""
        if self._own is not None:
            self._own.stop(patience_secs)


def _environment(settings: Settings) -> dict[str, str]:
    """Ours with every setting spelled out: the worker must not decide otherwise."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    kept.update({k: v for k, v in os.environ.items() if k == PREFIX + "KERNELS"})
    for spec in fields(settings):
        if spec.name != "sources":
            kept[PREFIX + spec.name.upper()] = str(getattr(settings, spec.name))
    return kept


def _new_log(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in sorted(folder.glob("worker-*.log"))[:-_KEPT_LOGS]:
        old.unlink(missing_ok=True)
    return folder / f"worker-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
