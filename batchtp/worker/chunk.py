"""One claimed chunk, from its lease to its rows."""

from __future__ import annotations

import json
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from batchtp.core import (
    BatchState,
    Completion,
    Endpoint,
    Failure,
    FinishReason,
    GenerationRequest,
    RequestKey,
)
from batchtp.errors import DatabaseUnavailableError, GroupStoppedError, RequestError
from batchtp.queue.openai import parse_body
from batchtp.settings import Settings
from batchtp.store import Store, leases
from batchtp.store.leases import Lease, LeasedRequest, LeaseLostError
from batchtp.worker.engine import Engine

log = logging.getLogger(__name__)

# Completions that come this close together share a transaction.
_GATHER_SECS = 0.05
_GATHER_ROWS = 64
_RETRY_SECS = 1.0


@dataclass(frozen=True, slots=True)
class ChunkEnd:
    """How the work on a chunk ended: every row is there, or it was handed back or lost."""

    finished: bool


class ChunkWork:
    """Runs one lease on the engine. `stopping` tells that the worker is to hand back."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        settings: Settings,
        lease: Lease,
        stopping: Callable[[], bool],
    ) -> None:
        self._store = store
        self._engine = engine
        self._settings = settings
        self._lease = lease
        self._stopping = stopping
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._endpoints: dict[RequestKey, Endpoint] = {}
        self._open: set[RequestKey] = set()
        self._unwritten: list[tuple[Completion, str]] = []
        self._next_beat = 0.0
        self._cancelled = False

    def run(self) -> ChunkEnd:
        """Until every row is written, the lease is lost, or the worker stops.

        Raises DatabaseUnavailableError when the chunk's end cannot be written; its lease expires.
        """
        try:
            return self._run()
        except LeaseLostError as error:
            log.warning("%s", error)
            return ChunkEnd(finished=False)
        finally:
            # However it ended: nobody waits for what still runs.
            self._engine.cancel(self._open)

    def _run(self) -> ChunkEnd:
        try:
            self._submit()
        except GroupStoppedError:
            return self._hand_back()
        while self._open or self._unwritten:
            if self._stopping() or self._engine.failure() is not None:
                return self._hand_back()
            self._gather()
            self._write()
            self._beat()
        leases.finish(self._store, self._lease)
        return ChunkEnd(finished=True)

    def _submit(self) -> None:
        good: list[GenerationRequest] = []
        for leased in self._lease.requests:
            key = RequestKey(self._lease.batch_id, leased.index)
            self._open.add(key)
            try:
                request = _request(key, leased)
            except RequestError as error:
                self._endpoints[key] = Endpoint.CHAT
                self._done.put(_failed(key, Failure(error.code, error.message, error.param)))
                continue
            self._endpoints[key] = request.endpoint
            good.append(request)
        self._engine.submit(good, self._done.put)

    def _gather(self) -> None:
        """Wait for a completion, then take those that come close behind it."""
        wait_secs = min(max(self._next_beat - time.monotonic(), 0.0), _RETRY_SECS)
        if self._unwritten:
            # The last write failed: the database gets a moment, completions wait in their queue.
            time.sleep(_RETRY_SECS)
            return
        until = 0.0
        while len(self._unwritten) < _GATHER_ROWS and self._open:
            try:
                completion = self._done.get(timeout=max(wait_secs, 0.001))
            except queue.Empty:
                return
            self._open.discard(completion.key)
            row = self._cancelled_row(completion)
            self._unwritten.append((row, self._endpoints[completion.key]))
            until = until or time.monotonic() + _GATHER_SECS
            wait_secs = until - time.monotonic()
            if wait_secs <= 0:
                return

    def _cancelled_row(self, completion: Completion) -> Completion:
        if completion.finish_reason is not FinishReason.CANCELLED:
            return completion
        return replace(
            completion,
            failure=Failure("batch_cancelled", "The batch was cancelled while this request ran."),
        )

    def _write(self) -> None:
        if not self._unwritten:
            return
        try:
            leases.write(self._store, self._lease, self._unwritten)
        except DatabaseUnavailableError as error:
            # Kept in memory and tried again; past the lease another worker does them anew.
            log.warning("%d rows wait: %s", len(self._unwritten), error)
            return
        self._unwritten = []

    def _beat(self) -> None:
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + self._settings.heartbeat_secs
        tokens = sum(self._engine.progress(self._open).values())
        try:
            state = leases.heartbeat(self._store, self._lease, self._settings.lease_secs, tokens)
        except DatabaseUnavailableError as error:
            log.warning("a heartbeat failed: %s", error)
            return
        if state is BatchState.CANCELLING and not self._cancelled:
            self._cancelled = True
            self._engine.cancel(self._open)

    def _hand_back(self) -> ChunkEnd:
        """Write what is finished and let another worker have the rest at once."""
        self._engine.cancel(self._open)
        self._write()
        failure = self._engine.failure()
        if failure is None:
            leases.hand_back(self._store, self._lease)
        else:
            # It may be this chunk that broke the engine: the attempt counts.
            leases.give_up(self._store, self._lease)
        log.info(
            "handed a chunk back",
            extra={"batch_id": self._lease.batch_id, "chunk": self._lease.seq},
        )
        return ChunkEnd(finished=False)


def _request(key: RequestKey, leased: LeasedRequest) -> GenerationRequest:
    """The stored line, checked again: what came through a queue is a hint."""
    try:
        payload = json.loads(leased.payload)
        url, body = Endpoint(payload["url"]), dict(payload["body"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise RequestError("invalid_request", "The stored request is malformed.") from None
    return parse_body(key, leased.custom_id, url, body)


def _failed(key: RequestKey, failure: Failure) -> Completion:
    return Completion(key, finish_reason=FinishReason.ERROR, failure=failure)
