"""What a worker process holds while it lives: the store, the engine, and its standing jobs."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from batchtp.errors import DatabaseUnavailableError, ServiceError
from batchtp.queue import workers
from batchtp.queue.celery_config import GENERATE_TASK, generate_queue
from batchtp.queue.intake import Intake
from batchtp.queue.submit import connect
from batchtp.settings import Settings
from batchtp.store import Store, leases, migrate, sweep
from batchtp.worker.chunk import ChunkWork
from batchtp.worker.engine import Engine

log = logging.getLogger(__name__)

_DAY_SECS = 86_400.0
# How often the engine's health is looked at.
_WATCH_SECS = 0.5


class Runtime:
    """One worker. `on_dead_engine` is called once when the engine has given up for good."""

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        engine: Engine,
        model: str,
        on_dead_engine: Callable[[], None],
    ) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.model = model
        self.engine = engine
        self.settings = settings
        self.store = Store(settings.database_url)
        self._app = app
        self._redis = connect(settings)
        self.intake = Intake(self.store, self._redis, settings, self.ring)
        self._on_dead_engine = on_dead_engine
        self._slots = threading.BoundedSemaphore(settings.worker_chunks)
        self._draining = threading.Event()
        self._hand_back_at = float("inf")
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Check the schema, bring the engine up, begin the standing jobs.

        Raises SchemaError, DatabaseUnavailableError, ModelError, GroupStartError.
        """
        migrate.check(self.store)
        self.engine.start()
        log.info("serving", extra={"model": self.model, "worker": self.name})
        for job, every_secs in (
            (self._sweep, self.settings.sweep_secs),
            (self._announce, workers.BEAT_SECS),
            (self._watch_engine, _WATCH_SECS),
        ):
            thread = threading.Thread(
                target=self._repeat, args=(job, every_secs), name=job.__name__, daemon=True
            )
            thread.start()
            self._threads.append(thread)
        # Whatever waited for a worker of this model waits no longer.
        self.ring(self.model)

    def drain(self) -> None:
        """Take no more chunks; those in work may go on for the grace time. Signal safe."""
        self._hand_back_at = min(self._hand_back_at, time.monotonic() + self.settings.grace_secs)
        self._draining.set()

    def stop(self) -> None:
        """After `drain`, when no task runs any more: end the engine and let everything go."""
        self.drain()
        for thread in self._threads:
            thread.join()
        self.engine.stop(0.0)
        try:
            workers.withdraw(self._redis, self.settings, self.name)
        except redis.RedisError as error:
            log.warning("could not sign off: %s", error)
        self.store.close()
        self._redis.close()

    def ring(self, model: str) -> None:
        """Say that a chunk of this model is ready. Only a hint: the sweeper rings again."""
        try:
            self._app.send_task(
                GENERATE_TASK,
                queue=generate_queue(self.settings, model),
                retry_policy={"max_retries": 1, "interval_start": 0.2},
            )
        except OperationalError as error:
            log.warning("could not ring: %s", error)

    def work(self) -> None:
        """Answer a doorbell: chunk after chunk until none is ready or the worker is full."""
        while not self._draining.is_set() and self._slots.acquire(blocking=False):
            try:
                lease = leases.claim(self.store, self.model, self.name, self.settings.lease_secs)
                if lease is None:
                    return
                # Others may be ready too, and this worker may have room for them.
                self.ring(self.model)
                ChunkWork(self.store, self.engine, self.settings, lease, self._is_over).run()
            finally:
                self._slots.release()
        if self._draining.is_set():
            self.ring(self.model)

    def _is_over(self) -> bool:
        return time.monotonic() >= self._hand_back_at

    def _repeat(self, job: Callable[[], None], every_secs: float) -> None:
        while not self._draining.is_set():
            try:
                job()
            except (ServiceError, redis.RedisError) as error:
                log.warning("%s: %s", job.__name__.strip("_"), error)
            self._draining.wait(every_secs)

    def _sweep(self) -> None:
        settings = self.settings
        try:
            waiting = sweep.sweep(
                self.store,
                max_attempts=settings.max_attempts,
                waiting_secs=settings.sweep_secs,
                retention_secs=settings.retention_days * _DAY_SECS,
            )
        except DatabaseUnavailableError as error:
            log.warning("could not sweep: %s", error)
            return
        for model in waiting:
            self.ring(model)

    def _announce(self) -> None:
        workers.announce(self._redis, self.settings, self.name, self.model)

    def _watch_engine(self) -> None:
        if self.engine.failure() is not None:
            log.critical("the engine has given up: %s", self.engine.failure())
            self._draining.set()
            self._hand_back_at = 0.0
            self._on_dead_engine()
