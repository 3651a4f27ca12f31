"""What intake tasks do: rows into Postgres, and the word to whoever waits.

Runs on any worker. A message is acknowledged after the commit, so it may come twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import redis

from batchtp.errors import RequestError
from batchtp.queue import wire
from batchtp.queue.submit import tell_acceptance
from batchtp.settings import Settings
from batchtp.store import Store, intake
from batchtp.store.intake import Acceptance, BatchHead, Seal

log = logging.getLogger(__name__)


class Intake:
    """Takes submissions in. `ring(model)` is called for a batch that may run now."""

    def __init__(
        self, store: Store, client: redis.Redis, settings: Settings, ring: Callable[[str], None]
    ) -> None:
        self._store = store
        self._redis = client
        self._settings = settings
        self._ring = ring

    def chunk(self, head_document: Mapping[str, Any], seq: int, packed: str) -> None:
        """A chunk of requests. A malformed message is logged and dropped: it names nobody."""
        try:
            head = wire.read_head(head_document)
            if not wire.is_count(seq):
                raise RequestError("invalid_message", "The chunk has no number.")
            rows, digest = wire.unpack(packed)
        except RequestError as error:
            log.error("dropped a malformed intake message: %s", error)
            return
        self._told(head, intake.add_chunk(self._store, head, seq, digest, rows))

    def seal(self, head_document: Mapping[str, Any], document: Mapping[str, Any]) -> None:
        """The end of a submission."""
        try:
            head = wire.read_head(head_document)
            seal = _read_seal(document)
        except RequestError as error:
            log.error("dropped a malformed seal: %s", error)
            return
        self._told(head, intake.seal(self._store, head, seal))

    def _told(self, head: BatchHead, acceptance: Acceptance | None) -> None:
        if acceptance is None:
            return
        tell_acceptance(self._redis, self._settings, head.batch_id, acceptance)
        if acceptance.newly and acceptance.error is None:
            log.info("batch accepted", extra={"batch_id": head.batch_id, "total": acceptance.total})
            self._ring(head.model)


def _read_seal(document: Mapping[str, Any]) -> Seal:
    match document:
        case {"total": total, "chunk_count": count, "digest": str(digest)} if (
            wire.is_count(total) and wire.is_count(count) and digest.isalnum()
        ):
            return Seal(total, count, digest)
    raise RequestError("invalid_message", "The seal is malformed.")
