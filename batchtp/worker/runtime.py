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

from batchtp.errors import BatchtpError, DatabaseUnavailableError, GroupStoppedError, ServiceError
from batchtp.queue import workers
from batchtp.queue.intake import Intake
from batchtp.queue.submit import connect
from batchtp.settings import Settings
from batchtp.store import Store, leases, migrate, sweep
from batchtp.worker.chunk import ChunkWork
from batchtp.worker.doorbell import Doorbell
from batchtp.worker.engine import Engine
from batchtp.worker.loading import LoadingReport

log = logging.getLogger(__name__)

_DAY_SECS = 86_400.0
_PURGE_SECS = 600.0
# How often the engine's health is looked at.
_WATCH_SECS = 0.5
# A full worker gives others this long to hear the bell that it could not answer.
_PASS_ON_SECS = 0.5
_RETRY_SECS = 2.0


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
        # What kept it from starting.
        self.refusal: BatchtpError | None = None
        self._redis = connect(settings)
        self._bell = Doorbell(app, settings)
        self.intake = Intake(self.store, self._redis, settings, self._bell.ring)
        self._on_dead_engine = on_dead_engine
        self._slots = threading.BoundedSemaphore(settings.worker_chunks)
        self._draining = threading.Event()
        self._hand_back_at = float("inf")
        self._leases_count_from = 0.0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Check the schema, bring the engine up, begin the standing jobs.

        Raises SchemaError, DatabaseUnavailableError, ModelError, GroupStartError, or
        GroupStoppedError when told to stop meanwhile.
        """
        migrate.check(self.store)
        self._standing("drain", self._end_start)
        loading = LoadingReport(self._announce_loading)
        try:
            self.engine.start(loading.show)
        finally:
            loading.end()
        if self._draining.is_set():
            raise GroupStoppedError("The worker was told to stop while it started.")
        log.info("serving", extra={"model": self.model, "worker": self.name})
        for job, every_secs in (
            (self._sweep, self.settings.sweep_secs),
            (self._purge, _PURGE_SECS),
            (self._announce, workers.BEAT_SECS),
            (self._watch_engine, _WATCH_SECS),
        ):
            self._standing(job.__name__.strip("_"), self._repeat, job, every_secs)
        self._bell.start()
        # Whatever waited for a worker of this model waits no longer.
        self._bell.ring(self.model)

    @property
    def draining(self) -> bool:
        """Whether it takes no more chunks."""
        return self._draining.is_set()

    def drain(self) -> None:
        """Take no more chunks; those in work may go on for the grace time. Signal safe."""
        self._hand_back_at = min(self._hand_back_at, time.monotonic() + self.settings.grace_secs)
        if not self._draining.is_set():
            self._draining.set()

    def stop(self) -> None:
        """End the engine and let everything go, when no task runs any more."""
        self.drain()
        for thread in self._threads:
            thread.join()
        self.engine.stop(0.0)
        self._bell.close()
        try:
            workers.withdraw(self._redis, self.settings, self.name)
        except redis.RedisError as error:
            log.warning("could not sign off: %s", error)
        self.store.close()
        self._redis.close()

    def take_in(self, job: Callable[[], None]) -> bool:
        """Do an intake job, however long the services are away; whether it was done.

        Until Postgres has them, its message is all there is of its requests.
        """
        while True:
            try:
                job()
                return True
            except (ServiceError, redis.RedisError) as error:
                log.warning("intake waits: %s", error)
            if self._draining.wait(_RETRY_SECS):
                return False

    def work(self) -> None:
        """Answer a doorbell: chunk after chunk until none is ready or the worker is full."""
        while not self._draining.is_set():
            if not self._slots.acquire(blocking=False):
                self._bell.ring(self.model, _PASS_ON_SECS)
                return
            try:
                if not self._work_on_one():
                    return
            except ServiceError as error:
                # The chunk's lease, if it has one, expires; the sweeper rings.
                log.warning("a chunk was left: %s", error)
                return
            finally:
                self._slots.release()
        self._bell.ring(self.model)

    def _work_on_one(self) -> bool:
        lease = leases.claim(self.store, self.model, self.name, self.settings.lease_secs)
        if lease is None:
            return False
        # Others may be ready too, and this worker or another may have room for them.
        self._bell.ring(self.model)
        ChunkWork(self.store, self.engine, self.settings, lease, self._is_over).run()
        return True

    def _is_over(self) -> bool:
        return time.monotonic() >= self._hand_back_at

    def _standing(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _end_start(self) -> None:
        """A start may take minutes: told to stop, it is not waited for."""
        self._draining.wait()
        log.info("stopping; a second signal ends the worker at once")
        if not self._bell.started:
            self.engine.stop(0.0)

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
                expire=time.monotonic() >= self._leases_count_from,
            )
        except DatabaseUnavailableError:
            # Nobody could heartbeat either: holders get the time to say that they live.
            self._leases_count_from = time.monotonic() + settings.lease_secs
            raise
        for model in waiting:
            self._bell.ring(model)

    def _purge(self) -> None:
        gone = sweep.purge(self.store, self.settings.retention_days * _DAY_SECS)
        if gone:
            log.info("purged %d batches past their retention", gone)

    def _announce(self) -> None:
        workers.announce(self._redis, self.settings, self.name, self.model)

    def _announce_loading(self, loaded: float) -> None:
        try:
            workers.announce(self._redis, self.settings, self.name, self.model, loaded)
        except redis.RedisError as error:
            log.warning("could not tell how far loading is: %s", error)

    def _watch_engine(self) -> None:
        if self.engine.failure() is not None:
            log.critical("the engine has given up: %s", self.engine.failure())
            self._hand_back_at = 0.0
            self._draining.set()
            self._on_dead_engine()
