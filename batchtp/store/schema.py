"""The tables. Migrations are held equal to this by a test.

Payloads and answers are text, not jsonb: a JSON escape of NUL is valid text but no jsonb, and
nothing here is queried by content. lz4 is three times faster to write than the default compression.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(column_0_label)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
    }
)

_NOW = sa.text("now()")


def _when(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True))


batches = sa.Table(
    "batches",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
    sa.Column("metadata", pg.JSON, nullable=False),
    # Known once sealed.
    sa.Column("total", sa.Integer),
    sa.Column("chunk_count", sa.Integer),
    sa.Column("digest", sa.Text),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=_NOW),
    _when("accepted_at"),
    _when("started_at"),
    _when("finished_at"),
    # Frozen at the end; derived from completions until then.
    sa.Column("completed", sa.Integer),
    sa.Column("failed", sa.Integer),
    sa.Column("prompt_tokens", sa.BigInteger),
    sa.Column("completion_tokens", sa.BigInteger),
    sa.Column("error_code", sa.Text),
    sa.Column("error_message", sa.Text),
    sa.Index(
        "ix_batches_unfinished",
        "state",
        postgresql_where=sa.text("finished_at is null"),
    ),
    sa.Index("ix_batches_created_at", "created_at"),
)

chunks = sa.Table(
    "chunks",
    metadata,
    sa.Column("batch_id", sa.Text, sa.ForeignKey("batches.id", ondelete="cascade")),
    sa.Column("seq", sa.Integer),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("count", sa.Integer, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    # Grows with every claim: whoever holds an older one may not write.
    sa.Column("fence", sa.Integer, nullable=False, server_default="0"),
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
    sa.Column("worker", sa.Text),
    _when("lease_expires_at"),
    _when("ready_at"),
    # Tokens of requests still running, from the last heartbeat.
    sa.Column("running_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.PrimaryKeyConstraint("batch_id", "seq"),
    sa.Index(
        "ix_chunks_ready",
        "model",
        sa.text("priority desc"),
        "ready_at",
        "seq",
        postgresql_where=sa.text("state = 'ready'"),
    ),
    sa.Index(
        "ix_chunks_leased",
        "lease_expires_at",
        postgresql_where=sa.text("state = 'leased'"),
    ),
)

requests = sa.Table(
    "requests",
    metadata,
    sa.Column("batch_id", sa.Text, sa.ForeignKey("batches.id", ondelete="cascade")),
    sa.Column("index", sa.Integer),
    sa.Column("chunk_seq", sa.Integer, nullable=False),
    sa.Column("line", sa.Integer, nullable=False),
    sa.Column("custom_id", sa.Text, nullable=False),
    sa.Column("endpoint", sa.Text, nullable=False, server_default="/v1/chat/completions"),
    # JSON, pure ASCII; null for a line that was bad at submission.
    sa.Column("payload", sa.Text),
    sa.PrimaryKeyConstraint("batch_id", "index"),
    sa.Index("ix_requests_chunk", "batch_id", "chunk_seq"),
)

completions = sa.Table(
    "completions",
    metadata,
    sa.Column("batch_id", sa.Text, sa.ForeignKey("batches.id", ondelete="cascade")),
    sa.Column("index", sa.Integer),
    # The writing transaction: readers that follow a batch use it as their cursor.
    sa.Column(
        "transaction",
        sa.BigInteger,
        nullable=False,
        server_default=sa.text("(pg_current_xact_id()::text)::bigint"),
    ),
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("text_escaped", sa.Boolean, nullable=False, server_default="false"),
    sa.Column("token_ids", pg.ARRAY(sa.Integer), nullable=False),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("completion_tokens", sa.Integer, nullable=False),
    sa.Column("finish_reason", sa.Text, nullable=False),
    sa.Column("error_code", sa.Text),
    sa.Column("error_message", sa.Text),
    sa.Column("error_param", sa.Text),
    # Whose work it is: the lease's fence and the TP group's generation.
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False, server_default=_NOW),
    sa.PrimaryKeyConstraint("batch_id", "index"),
    sa.Index("ix_completions_transaction", "batch_id", "transaction", "index"),
)
