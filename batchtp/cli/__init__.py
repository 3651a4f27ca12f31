"""The command line. `main` is the entry point of `batchtp` and of `python -m batchtp`."""

from __future__ import annotations

from batchtp.cli.main import app, main

__all__ = ["app", "main"]
