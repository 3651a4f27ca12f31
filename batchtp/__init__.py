"""batchtp: an async job-queue worker for offline batch generation with tensor-parallel models."""

__version__ = "0.1.0"
