"""batchtp: an async job-queue worker for offline batch generation on tensor-parallel int4 models."""

__version__ = "0.1.0"
