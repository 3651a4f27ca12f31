"""Submission: chunks of checked rows to Redis, then the seal, then the wait for acceptance.

A client needs Redis only. The acceptance comes back through a Redis key.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from batchtp.errors import (
    BatchConflictError,
    BrokerUnavailableError,
    InputError,
    InvalidLinesError,
    NotAcceptedError,
)
from batchtp.queue import wire
from batchtp.queue.celery_config import (
    HIDDEN_ARGUMENTS,
    INTAKE_TASK,
    SEAL_TASK,
    intake_queue,
    make_celery,
    redis_py_url,
    socket_options,
)
from batchtp.queue.lines import LineChecker, Source
from batchtp.settings import Settings, mask_url
from batchtp.store.intake import Acceptance, BatchHead, IncomingRequest, digest_of

# Longer than any client waits; short enough not to pile up.
_REPLY_TTL_SECS = 24 * 3600
_POLL_SECS = 0.05


@dataclass(frozen=True, slots=True)
class Submission:
    """What was sent."""

    batch_id: str
    total: int
    bad: int
    digest: str


class Submitter:
    """Sends batches over one broker."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._app: Celery = make_celery(settings)
        self.redis = connect(settings)

    def close(self) -> None:
        """Let go of the connections."""
        self._app.close()
        self.redis.close()

    def submit(self, source: Source, head: BatchHead, *, strict: bool, text: bool) -> Submission:
        """Send every line, then the seal.

        `strict` reads a file twice: nothing is sent unless every line is good. Raises InputError,
        InvalidLinesError, BrokerUnavailableError.
        """
        rows = self._checked(source, head.model, text)
        if strict:
            listed = list(rows) if not isinstance(source, str) or source == "-" else None
            _refuse_bad(listed if listed is not None else rows)
            rows = iter(listed) if listed is not None else self._checked(source, head.model, text)
        digests: list[str] = []
        total = bad = 0
        with self._sending():
            self.redis.delete(reply_key(self._settings, head.batch_id))
            for chunk in self._chunks(rows):
                packed, digest = wire.pack(chunk)
                self._send(INTAKE_TASK, [wire.head_document(head), len(digests), packed])
                digests.append(digest)
                total += len(chunk)
                bad += sum(row.failure is not None for row in chunk)
            if not total:
                raise InputError(
                    "There is nothing to submit: no line holds a request.", code="empty_file"
                )
            whole = digest_of(digests)
            seal = {"total": total, "chunk_count": len(digests), "digest": whole}
            self._send(SEAL_TASK, [wire.head_document(head), seal])
        return Submission(head.batch_id, total, bad, whole)

    def wait_accepted(self, submission: Submission, timeout_secs: float) -> None:
        """Return once Postgres holds all of it.

        Raises NotAcceptedError after the timeout or when it failed, BatchConflictError when the
        id holds other requests.
        """
        deadline = time.monotonic() + timeout_secs
        with self._sending():
            while (reply := self._reply(submission.batch_id)) is None:
                if time.monotonic() > deadline:
                    raise NotAcceptedError(
                        f"Batch {submission.batch_id} was sent, but no worker has taken it in "
                        f"within {timeout_secs:g} s. Is a worker running? It will be accepted "
                        "when one starts; submitting again under the same id is safe."
                    )
                time.sleep(_POLL_SECS)
        if reply["digest"] != submission.digest:
            raise BatchConflictError(
                f"Batch {submission.batch_id} exists with other requests; use another batch id."
            )
        if reply["error"]:
            raise NotAcceptedError(f"Batch {submission.batch_id} failed: {reply['error']}")

    def _reply(self, batch_id: str) -> dict[str, Any] | None:
        found = self.redis.get(reply_key(self._settings, batch_id))
        return json.loads(found) if isinstance(found, bytes) else None

    def _checked(self, source: Source, model: str, text: bool) -> Iterator[IncomingRequest]:
        checker = LineChecker(model, text=text, max_line_bytes=self._settings.max_line_bytes)
        return checker.rows(source)

    def _chunks(self, rows: Iterator[IncomingRequest]) -> Iterator[list[IncomingRequest]]:
        chunk: list[IncomingRequest] = []
        size = 0
        for row in rows:
            row_bytes = len(row.payload or "")
            full = len(chunk) >= self._settings.chunk_requests
            if chunk and (full or size + row_bytes > self._settings.chunk_bytes):
                yield chunk
                chunk, size = [], 0
            chunk.append(row)
            size += row_bytes
        if chunk:
            yield chunk

    def _send(self, task: str, arguments: list[Any]) -> None:
        self._app.send_task(
            task,
            args=arguments,
            queue=intake_queue(self._settings),
            argsrepr=HIDDEN_ARGUMENTS,
            kwargsrepr=HIDDEN_ARGUMENTS,
            retry_policy={"max_retries": 5, "interval_start": 0.2, "interval_max": 2},
        )

    @contextmanager
    def _sending(self) -> Iterator[None]:
        try:
            yield
        except (OperationalError, redis.RedisError, ConnectionError) as error:
            raise BrokerUnavailableError(
                f"The broker at {mask_url(self._settings.redis_url)} does not answer: {error}. "
                "What was sent is not lost; submit again under the same batch id."
            ) from error


def connect(settings: Settings) -> redis.Redis:
    """A redis-py client with bounded waits. Connects when it is first used."""
    return redis.Redis.from_url(redis_py_url(settings.redis_url), **_options(settings.redis_url))


def reply_key(settings: Settings, batch_id: str) -> str:
    """Where the acceptance of a batch is told."""
    return f"{settings.key_prefix}:accepted:{batch_id}"


def tell_acceptance(
    client: redis.Redis, settings: Settings, batch_id: str, acceptance: Acceptance
) -> None:
    """Let whoever waits know what became of the batch."""
    error = acceptance.error
    reply = {"digest": acceptance.digest, "error": error.message if error else None}
    client.set(reply_key(settings, batch_id), json.dumps(reply), ex=_REPLY_TTL_SECS)


def _options(url: str) -> dict[str, Any]:
    options = socket_options()
    if "://" in url and url.split("://", 1)[0] in ("unix", "redis+socket"):
        # A Unix socket knows neither.
        del options["socket_keepalive"], options["socket_connect_timeout"]
    return options


def _refuse_bad(rows: Iterator[IncomingRequest] | Sequence[IncomingRequest]) -> None:
    bad = [
        (row.line, row.failure.code, row.failure.message) for row in rows if row.failure is not None
    ]
    if bad:
        shown = "\n".join(f"  line {line}: {code}: {message}" for line, code, message in bad)
        raise InvalidLinesError(
            f"{len(bad)} bad lines, nothing was submitted:\n{shown}", tuple(bad)
        )
