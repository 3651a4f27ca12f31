"""Batches, chunks, requests, completions.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Long texts. Postgres falls back to its default compression where it was built without lz4.
LZ4 = (("requests", "payload"), ("completions", "text"))


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("metadata", postgresql.JSON(), server_default="{}", nullable=False),
        sa.Column("total", sa.Integer(), nullable=True),
        sa.Column("chunk_count", sa.Integer(), nullable=True),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("accepted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("completed", sa.Integer(), nullable=True),
        sa.Column("failed", sa.Integer(), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=True),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index("ix_batches_created_at", "batches", ["created_at"], unique=False)
    op.create_index(
        "ix_batches_unfinished",
        "batches",
        ["state"],
        unique=False,
        postgresql_where=sa.text("finished_at is null"),
    )
    op.create_table(
        "chunks",
        sa.Column("batch_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("fence", sa.Integer(), server_default="0", nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ready_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("running_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_chunks_batch_id"), ondelete="cascade"
        ),
        sa.PrimaryKeyConstraint("batch_id", "seq", name=op.f("pk_chunks")),
    )
    op.create_index(
        "ix_chunks_leased",
        "chunks",
        ["lease_expires_at"],
        unique=False,
        postgresql_where=sa.text("state = 'leased'"),
    )
    op.create_index(
        "ix_chunks_ready",
        "chunks",
        ["model", sa.literal_column("priority desc"), "ready_at", "seq"],
        unique=False,
        postgresql_where=sa.text("state = 'ready'"),
    )
    op.create_table(
        "completions",
        sa.Column("batch_id", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column(
            "transaction",
            sa.BigInteger(),
            server_default=sa.text("(pg_current_xact_id()::text)::bigint"),
            nullable=False,
        ),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("text_escaped", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("token_ids", postgresql.ARRAY(sa.Integer()), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("error_param", sa.Text(), nullable=True),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column(
            "finished_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_completions_batch_id"), ondelete="cascade"
        ),
        sa.PrimaryKeyConstraint("batch_id", "index", name=op.f("pk_completions")),
    )
    op.create_index(
        "ix_completions_transaction",
        "completions",
        ["batch_id", "transaction", "index"],
        unique=False,
    )
    op.create_table(
        "requests",
        sa.Column("batch_id", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("chunk_seq", sa.Integer(), nullable=False),
        sa.Column("line", sa.Integer(), nullable=False),
        sa.Column("custom_id", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_requests_batch_id"), ondelete="cascade"
        ),
        sa.PrimaryKeyConstraint("batch_id", "index", name=op.f("pk_requests")),
    )
    op.create_index("ix_requests_chunk", "requests", ["batch_id", "chunk_seq"], unique=False)
    _compress_with_lz4()


def _compress_with_lz4() -> None:
    methods = op.get_bind().execute(
        sa.text("select enumvals from pg_settings where name = 'default_toast_compression'")
    )
    if "lz4" in (methods.scalar() or ()):
        for table, column in LZ4:
            op.execute(f"alter table {table} alter column {column} set compression lz4")


def downgrade() -> None:
    op.drop_index("ix_requests_chunk", table_name="requests")
    op.drop_table("requests")
    op.drop_index("ix_completions_transaction", table_name="completions")
    op.drop_table("completions")
    op.drop_index(
        "ix_chunks_ready", table_name="chunks", postgresql_where=sa.text("state = 'ready'")
    )
    op.drop_index(
        "ix_chunks_leased", table_name="chunks", postgresql_where=sa.text("state = 'leased'")
    )
    op.drop_table("chunks")
    op.drop_index(
        "ix_batches_unfinished",
        table_name="batches",
        postgresql_where=sa.text("finished_at is null"),
    )
    op.drop_index("ix_batches_created_at", table_name="batches")
    op.drop_table("batches")
