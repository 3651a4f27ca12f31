"""The Celery worker: its tasks, and how it is run.

`batchtp worker` calls `run_worker`. `celery -A batchtp.worker.app worker --pool threads` works too,
with settings from the environment; any other pool is refused.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

from celery import Celery
from celery.exceptions import CPendingDeprecationWarning, Reject, SecurityWarning
from kombu import Exchange, Queue

from batchtp import logs, services
from batchtp.model.resolve import resolve_model
from batchtp.queue.celery_config import (
    GENERATE_TASK,
    INTAKE_TASK,
    SEAL_TASK,
    generate_queue,
    intake_queue,
    make_celery,
)
from batchtp.settings import Settings, load_settings
from batchtp.worker.bootstep import RuntimeStep, exit_failed, runtime_of
from batchtp.worker.engine import Engine
from batchtp.worker.runtime import Runtime
from batchtp.worker.supervisor import Supervisor

# Intake must not wait for threads that generate.
_INTAKE_THREADS = 2


def make_app(settings: Settings, engine: Engine | None = None) -> Celery:
    """The worker's application, its queues and its tasks. Connects to nothing yet.

    Without an `engine` the real one is made. Raises SettingsError, ModelNotFoundError.
    """
    app = make_celery(settings)
    model = settings.served_name
    if not model:
        model = resolve_model(settings.model, settings.home_path).name
    served = replace(settings, served_name=model)
    runtime = Runtime(app, served, engine or Supervisor(served), model, exit_failed)
    app.batchtp_runtime = runtime
    app.conf.worker_pool = "threads"
    app.conf.worker_concurrency = settings.worker_chunks + _INTAKE_THREADS
    # As a client's application names them: without an exchange of its own, a queue would get the
    # default one's messages too.
    app.conf.task_queues = [
        Queue(name, Exchange(name), routing_key=name)
        for name in (intake_queue(settings), generate_queue(settings, model))
    ]
    app.steps["worker"].add(RuntimeStep)
    _add_tasks(app, runtime)
    return app


def run_worker(settings: Settings, engine: Engine | None = None) -> None:
    """Serve until told to stop. SIGTERM and SIGINT finish what runs within the grace time.

    Raises what kept the engine from starting, or what ended it.
    """
    logs.configure(settings.log_level, settings.log_format)
    # Celery warns of root because of pickle, and only JSON is accepted here; and at every lost
    # connection of a default that is not used here.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
    app = make_app(settings, engine)
    runtime = runtime_of(app)
    worker = app.Worker(
        hostname=runtime.name,
        pool="threads",
        loglevel=settings.log_level.upper(),
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    worker.start()
    error = runtime.refusal or runtime.engine.failure()
    if error is not None:
        raise error


def _add_tasks(app: Celery, runtime: Runtime) -> None:
    def intake(head: dict[str, Any], seq: int, packed: str) -> None:
        if not runtime.take_in(lambda: runtime.intake.chunk(head, seq, packed)):
            raise Reject(requeue=True)

    def seal(head: dict[str, Any], document: dict[str, Any]) -> None:
        if not runtime.take_in(lambda: runtime.intake.seal(head, document)):
            raise Reject(requeue=True)

    def generate() -> None:
        runtime.work()

    app.task(intake, name=INTAKE_TASK, shared=False)
    app.task(seal, name=SEAL_TASK, shared=False)
    # A doorbell is a hint: acknowledged first, rung again by the sweeper.
    app.task(generate, name=GENERATE_TASK, shared=False, acks_late=False)


@functools.cache
def _app_of_environment() -> Celery:
    settings = load_settings()
    endpoints = services.ensure(settings)
    return make_app(
        replace(settings, redis_url=endpoints.redis_url, database_url=endpoints.database_url)
    )


def __getattr__(name: str) -> Celery:
    """`app` for Celery's own command line: made when asked for, from the environment."""
    if name in ("app", "celery"):
        return _app_of_environment()
    raise AttributeError(name)
