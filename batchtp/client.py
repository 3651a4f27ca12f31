"""The Python client.

    with Client() as client:
        batch = client.submit([{"prompt": "Hello", "max_tokens": 8}], model="my-model")
        for row in batch.completions():
            print(row.custom_id, row.text)

Submitting needs Redis only; everything else reads Postgres. With no URLs set the embedded services
of the data directory are used, and started if need be.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from batchtp import services
from batchtp.core import BatchState, BatchStatus, RequestCounts, TokenUsage
from batchtp.errors import (
    BatchNotFoundError,
    BrokerUnavailableError,
    UsageError,
)
from batchtp.queue import workers
from batchtp.queue.lines import Source
from batchtp.queue.output import output_line
from batchtp.queue.submit import Submission, Submitter, connect
from batchtp.settings import Settings, load_settings, mask_url
from batchtp.store import Store, batches, results
from batchtp.store.intake import BatchHead

_POLL_SECS = 0.2
_BATCH_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}")


class Client:
    """Submits batches and reads them back. Threads may share it. A context manager."""

    def __init__(self, settings: Settings | None = None) -> None:
        """Raises SettingsError, EmbeddedServiceError."""
        self._given = settings or load_settings()
        endpoints = services.ensure(self._given)
        self.settings = replace(
            self._given,
            redis_url=endpoints.redis_url,
            database_url=endpoints.database_url,
        )
        self._store = Store(self.settings.database_url)
        self._submitter = Submitter(self.settings)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close connections; embedded services started for this client are stopped."""
        self._submitter.close()
        self._store.close()
        services.release(self._given)

    def submit(
        self,
        source: Source,
        *,
        model: str | None = None,
        batch_id: str | None = None,
        strict: bool = False,
        text: bool = False,
        wait: bool = True,
        priority: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Submit a file (path, or - for standard input) or requests (dicts, or prompts).

        Bad lines become error rows; `strict` refuses the whole source instead. `wait` returns when
        Postgres holds all of it. The same `batch_id` twice is one batch. Raises InputError,
        InvalidLinesError, BatchConflictError, NotAcceptedError, BrokerUnavailableError.
        """
        name = batch_id or f"batch_{uuid.uuid4().hex}"
        if not _BATCH_ID.fullmatch(name):
            raise UsageError(
                f"{name!r} is no batch id: use letters, digits, '.', '_', ':' and '-', at most 255."
            )
        if not -(2**31) <= priority < 2**31:
            raise UsageError(f"Priority {priority} is out of range.")
        head = BatchHead(name, model or self.settings.model, priority, dict(metadata or {}))
        given = str(source) if isinstance(source, Path) else source
        sent = self._submitter.submit(given, head, strict=strict, text=text)
        if wait:
            self._submitter.wait_accepted(sent, self.settings.accept_timeout_secs)
        return Batch(self._store, name, submission=sent, model=head.model)

    def batch(self, batch_id: str) -> Batch:
        """A batch by its id; whether it exists shows when it is read."""
        return Batch(self._store, batch_id)

    def list(self, limit: int = 20) -> Iterator[BatchStatus]:
        """The newest batches, newest first."""
        return batches.newest(self._store, limit)

    def serving(self, model: str) -> bool:
        """Whether some live worker serves this model. Raises BrokerUnavailableError."""
        return model in self.served_models()

    def loaded_share(self, model: str) -> float | None:
        """How much of the model's weights its first worker has, 0 to 1; None without a worker.

        Raises BrokerUnavailableError.
        """
        try:
            return workers.loaded_share(self._submitter.redis, self.settings, model)
        except redis.RedisError as error:
            raise _unavailable(self.settings.redis_url, error) from error

    def served_models(self) -> frozenset[str]:
        """Models that live workers serve. Raises BrokerUnavailableError."""
        try:
            return workers.served_models(self._submitter.redis, self.settings)
        except redis.RedisError as error:
            raise _unavailable(self.settings.redis_url, error) from error


class Batch:
    """One submitted batch."""

    def __init__(
        self,
        store: Store,
        batch_id: str,
        *,
        submission: Submission | None = None,
        model: str = "",
    ) -> None:
        self.id = batch_id
        self.submission = submission
        self._store = store
        self._model = model

    def status(self) -> BatchStatus:
        """How it stands now. Raises BatchNotFoundError."""
        try:
            return batches.status(self._store, self.id)
        except BatchNotFoundError:
            if self.submission is None:
                raise
            return self._on_its_way(self.submission)

    def wait(
        self,
        timeout_secs: float | None = None,
        progress: Callable[[BatchStatus], None] | None = None,
    ) -> BatchStatus:
        """Return when it has ended; `progress` is told about every look on the way.

        Raises TimeoutError.
        """
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        while not (found := self.status()).state.final:
            if progress is not None:
                progress(found)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"Batch {self.id} is still {found.state} after {timeout_secs} s."
                )
            time.sleep(_POLL_SECS)
        return found

    def completions(self) -> Iterator[results.Row]:
        """Rows as they finish, each once, until the batch has ended."""
        transaction, index, given = 0, -1, 0
        while True:
            # Asked first: what is written before the end is then read after it.
            status = self.status()
            page = results.finished_since(self._store, self.id, transaction, index)
            yield from page
            given += len(page)
            if page:
                transaction, index = page[-1].transaction, page[-1].index
            elif status.state.final and given >= status.counts.completed + status.counts.failed:
                return
            else:
                time.sleep(_POLL_SECS)

    def __iter__(self) -> Iterator[results.Row]:
        return self.completions()

    def results(self) -> Iterator[results.Row]:
        """The rows there are now, in input order."""
        self.status()
        return results.in_order(self._store, self.id)

    def output_lines(self) -> Iterator[dict[str, Any]]:
        """The rows there are now, in input order, as OpenAI batch output lines."""
        model = self.status().model
        for row in results.in_order(self._store, self.id):
            yield output_line(self.id, model, row)

    def cancel(self) -> None:
        """Stop it; what is finished is kept. Raises BatchNotFoundError."""
        batches.cancel(self._store, self.id)

    def _on_its_way(self, submission: Submission) -> BatchStatus:
        return BatchStatus(
            id=self.id,
            model=self._model,
            state=BatchState.VALIDATING,
            counts=RequestCounts(submission.total),
            usage=TokenUsage(),
            created_at=datetime.now(UTC),
        )


def ping_broker(redis_url: str) -> str:
    """The broker's kind and version. Raises BrokerUnavailableError."""
    client = connect(replace(load_settings(environ={}), redis_url=redis_url))
    try:
        facts = client.info("server")
    except (redis.RedisError, OSError) as error:
        raise _unavailable(redis_url, error) from error
    finally:
        client.close()
    assert isinstance(facts, dict)
    if "valkey_version" in facts:
        return f"Valkey {facts['valkey_version']}"
    return f"Redis {facts.get('redis_version', 'of an unknown version')}"


def _unavailable(url: str, error: Exception) -> BrokerUnavailableError:
    return BrokerUnavailableError(f"The broker at {mask_url(url)} does not answer: {error}")
