"""The Celery worker: its tasks, and how it is run.

`batchtp worker` calls `run_worker`. `celery -A batchtp.worker.app worker --pool threads` works too,
with settings from the environment; any other pool is refused.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import replace
from typing import Any

from celery import Celery, signals
from celery.exceptions import SecurityWarning
from celery.worker import state as worker_state

from batchtp import logs
from batchtp.errors import SettingsError
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
from batchtp.worker.bootstep import RuntimeStep, runtime_of
from batchtp.worker.engine import Engine
from batchtp.worker.runtime import Runtime
from batchtp.worker.supervisor import Supervisor

log = logging.getLogger(__name__)

# Intake must not wait for threads that generate.
_INTAKE_THREADS = 2
_FAILED = 1


def make_app(settings: Settings, engine: Engine | None = None) -> Celery:
    """The worker's application, its queues and its tasks. Connects to nothing yet.

    Without an `engine` the real one is made. Raises SettingsError, ModelNotFoundError.
    """
    app = make_celery(settings)
    model = settings.served_name
    if not model:
        model = resolve_model(settings.model, settings.home_path).name
    served = replace(settings, served_name=model)
    runtime = Runtime(app, served, engine or Supervisor(served), model, _give_up)
    app.batchtp_runtime = runtime
    app.conf.worker_pool = "threads"
    app.conf.worker_concurrency = settings.worker_chunks + _INTAKE_THREADS
    app.conf.task_queues = None
    app.select_queues = None
    app.steps["worker"].add(RuntimeStep)
    _add_tasks(app, runtime)
    signals.worker_init.connect(_check_pool, weak=False)
    signals.worker_shutting_down.connect(_shutting_down(runtime), weak=False)
    return app


def run_worker(settings: Settings, engine: Engine | None = None) -> None:
    """Serve until told to stop. SIGTERM and SIGINT finish what runs within the grace time.

    Raises what kept the engine from starting, or what ended it.
    """
    logs.configure(settings.log_level, settings.log_format)
    # Celery warns of root because of pickle; only JSON is accepted here.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    app = make_app(settings, engine)
    runtime = runtime_of(app)
    worker = app.Worker(
        hostname=runtime.name,
        queues=[intake_queue(settings), generate_queue(settings, runtime.model)],
        pool="threads",
        loglevel=settings.log_level.upper(),
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    worker.start()
    failure = runtime.engine.failure()
    if failure is not None:
        raise failure


def _add_tasks(app: Celery, runtime: Runtime) -> None:
    def intake(head: dict[str, Any], seq: int, packed: str) -> None:
        runtime.intake.chunk(head, seq, packed)

    def seal(head: dict[str, Any], document: dict[str, Any]) -> None:
        runtime.intake.seal(head, document)

    def generate() -> None:
        runtime.work()

    # An intake message is all there is of its requests until Postgres has them, so it comes again
    # after a failure. A doorbell is a hint: acknowledged first, rung again by the sweeper.
    again: dict[str, Any] = {
        "autoretry_for": (Exception,),
        "max_retries": None,
        "retry_backoff": True,
        "retry_backoff_max": 10,
    }
    app.task(intake, name=INTAKE_TASK, shared=False, **again)
    app.task(seal, name=SEAL_TASK, shared=False, **again)
    app.task(generate, name=GENERATE_TASK, shared=False, acks_late=False)


def _check_pool(sender: Any, **_: Any) -> None:
    pool = str(getattr(sender, "pool_cls", ""))
    if "thread" not in pool.lower():
        raise SettingsError(
            f"The pool {pool} cannot host batchtp: forked pools may not own rank processes, and "
            "others block. Use --pool threads."
        )


def _shutting_down(runtime: Runtime) -> Any:
    def handle(how: str = "Warm", **_: Any) -> None:
        if how != "Warm":
            # The second signal: ranks die with this process.
            os._exit(_FAILED)
        runtime.drain()

    return handle


def _give_up() -> None:
    worker_state.should_stop = _FAILED


def __getattr__(name: str) -> Celery:
    """`app` for Celery's own command line: made when asked for, from the environment."""
    if name in ("app", "celery"):
        from batchtp import services

        settings = load_settings()
        endpoints = services.ensure(settings)
        return make_app(
            replace(
                settings,
                redis_url=endpoints.redis_url,
                database_url=endpoints.database_url,
            )
        )
    raise AttributeError(name)
