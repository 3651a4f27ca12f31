"""Celery's life and the worker's, tied together: the engine starts and stops with the pool."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

from celery import bootsteps
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.worker import state as worker_state

from batchtp.errors import BatchtpError, SettingsError
from batchtp.worker.runtime import Runtime

log = logging.getLogger(__name__)

# SIGHUP too: Celery would start itself again in the middle of a chunk.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class RuntimeStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Starts the runtime once there is a pool, and stops it when its tasks have ended."""

    requires = ("celery.worker.components:Pool",)
    label = "batchtp"

    def __init__(self, parent: Any, **_: Any) -> None:
        """Raises SettingsError for any pool but threads."""
        super().__init__(parent)
        pool = parent.pool_cls
        if not issubclass(pool, ThreadPool):
            raise SettingsError(
                f"The pool {pool.__module__} cannot host batchtp: forked pools may not own rank "
                "processes, and the others block. Use --pool threads."
            )

    def start(self, parent: Any) -> None:
        """Bring the engine up before the consumer takes its first message."""
        runtime = runtime_of(parent.app)
        if threading.current_thread() is threading.main_thread():
            _handle_signals(runtime)
        try:
            runtime.start()
        except BatchtpError as error:
            told_to_stop = runtime.draining
            runtime.stop()
            if told_to_stop:
                raise SystemExit(0) from error
            runtime.refusal = error
            log.critical("cannot serve: %s", error)
            raise SystemExit(error.exit_code) from error

    def stop(self, parent: Any) -> None:
        """Celery stops the consumer and waits for tasks first."""
        runtime_of(parent.app).stop()

    def terminate(self, parent: Any) -> None:
        """A cold shutdown ends the engine the same way, with no grace."""
        runtime_of(parent.app).stop()


def runtime_of(app: Any) -> Runtime:
    """The runtime that `make_app` gave the application."""
    runtime: Runtime = app.batchtp_runtime
    return runtime


def exit_failed() -> None:
    """Have Celery end this worker in order, with an exit code that says that it failed."""
    worker_state.should_stop = BatchtpError.exit_code


def _handle_signals(runtime: Runtime) -> None:
    """The first signal drains the worker, the second ends it at once; ranks die with it.

    Celery's own handlers wait for running tasks without a limit, in the threads pool for ever.
    """
    received = False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal received
        if received:
            os._exit(128 + number)
        received = True
        runtime.drain()
        worker_state.should_stop = 0

    for number in _SIGNALS:
        signal.signal(number, handle)
