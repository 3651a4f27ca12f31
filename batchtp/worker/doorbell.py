"""Telling workers that a chunk is ready, without ever waiting for the broker oneself."""

from __future__ import annotations

import logging
import threading
import time

from celery import Celery
from kombu.exceptions import OperationalError

from batchtp.queue.celery_config import GENERATE_TASK, generate_queue
from batchtp.settings import Settings

log = logging.getLogger(__name__)


class Doorbell:
    """Rings from a thread of its own. A ring is only a hint: the sweeper rings again."""

    def __init__(self, app: Celery, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._changed = threading.Condition()
        # When to ring for which model; one ring stands for all that are asked for until then.
        self._due: dict[str, float] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="doorbell", daemon=True)

    @property
    def started(self) -> bool:
        """Whether it rings."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Begin to ring."""
        self._thread.start()

    def ring(self, model: str, after_secs: float = 0.0) -> None:
        """Say that a chunk of this model is ready. Returns at once."""
        at = time.monotonic() + after_secs
        with self._changed:
            self._due[model] = min(at, self._due.get(model, at))
            self._changed.notify()

    def close(self) -> None:
        """Ring for what is owed, for the other workers, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (model := self._next()) is not None:
            self._send(model)

    def _next(self) -> str | None:
        """The model to ring for, when it is time; None at the end."""
        with self._changed:
            while True:
                model = min(self._due, key=lambda name: self._due[name], default=None)
                if model is not None and (self._closed or self._due[model] <= time.monotonic()):
                    del self._due[model]
                    return model
                if self._closed:
                    return None
                self._changed.wait(
                    None if model is None else max(0.0, self._due[model] - time.monotonic())
                )

    def _send(self, model: str) -> None:
        try:
            self._app.send_task(
                GENERATE_TASK,
                queue=generate_queue(self._settings, model),
                retry_policy={"max_retries": 1, "interval_start": 0.2},
            )
        except OperationalError as error:
            log.warning("could not ring for %s: %s", model, error)
