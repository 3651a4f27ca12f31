"""Reading rows back: in input order, or as they finish. Constant memory either way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy as sa

from batchtp.store.database import Store

_PAGE_ROWS = 500

_COLUMNS = """
    select r.custom_id, r.line, d.* from completions d
    join requests r on r.batch_id = d.batch_id and r."index" = d."index"
"""

_IN_ORDER = f"""{_COLUMNS}
    where d.batch_id = :id and d."index" > :index order by d."index" limit :rows
"""

# Rows of transactions older than every running one: none can still appear before them.
_AS_FINISHED = f"""{_COLUMNS}
    where d.batch_id = :id and (d.transaction, d."index") > (:transaction, :index)
      and d.transaction < (pg_snapshot_xmin(pg_current_snapshot())::text)::bigint
    order by d.transaction, d."index" limit :rows
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One request's end, as stored."""

    index: int
    line: int
    custom_id: str
    endpoint: str
    text: str
    text_escaped: bool
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    error_code: str | None
    error_message: str | None
    error_param: str | None
    fence: int
    generation: int
    transaction: int


def in_order(store: Store, batch_id: str) -> Iterator[Row]:
    """The rows there are now, in input order."""
    index = -1
    while page := _read(store, _IN_ORDER, {"id": batch_id, "index": index}):
        yield from page
        index = page[-1].index


def finished_since(store: Store, batch_id: str, transaction: int, index: int) -> list[Row]:
    """The next page of rows in the order they were written, after this (transaction, index)."""
    parameters: dict[str, object] = {"id": batch_id, "transaction": transaction, "index": index}
    return _read(store, _AS_FINISHED, parameters)


def _read(store: Store, query: str, parameters: dict[str, object]) -> list[Row]:
    with store.transaction() as connection:
        rows = connection.execute(sa.text(query), {**parameters, "rows": _PAGE_ROWS}).mappings()
        return [
            Row(
                token_ids=tuple(row["token_ids"]),
                **{name: row[name] for name in Row.__slots__ if name != "token_ids"},
            )
            for row in rows
        ]
