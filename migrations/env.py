"""Alembic's entry: runs migrations on the connection that store.migrate hands over."""

from alembic import context

from batchtp.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    compare_server_default=True,
)
context.run_migrations()
