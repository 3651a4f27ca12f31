"""Celery's life and the worker's, tied together: the engine starts and stops with the pool."""

from __future__ import annotations

from typing import Any

from celery import bootsteps

from batchtp.worker.runtime import Runtime


class RuntimeStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Starts the runtime once there is a pool, and stops it when its tasks have ended."""

    requires = ("celery.worker.components:Pool",)
    label = "batchtp"

    def start(self, parent: Any) -> None:
        """Bring the engine up before the consumer takes its first message."""
        runtime_of(parent.app).start()

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
