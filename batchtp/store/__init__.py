"""Everything that is SQL: the schema, and one module for each thing that is done with it."""

from batchtp.store.database import Store

__all__ = ["Store"]
