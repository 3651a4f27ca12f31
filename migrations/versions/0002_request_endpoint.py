"""Requests name their endpoint, so that no query has to look into a payload.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "requests",
        sa.Column("endpoint", sa.Text(), server_default="/v1/chat/completions", nullable=False),
    )
    # Payloads begin with their url. They are not cast to JSON: an escaped NUL cannot be.
    op.execute(
        "update requests set endpoint = '/v1/completions' "
        'where payload like \'{"url":"/v1/completions"%\''
    )
    # Always given; and a default of type json cannot be compared with the code's.
    op.alter_column("batches", "metadata", server_default=None)


def downgrade() -> None:
    op.alter_column("batches", "metadata", server_default="{}")
    op.drop_column("requests", "endpoint")
