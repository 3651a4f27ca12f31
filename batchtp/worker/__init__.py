"""The worker: Celery app, supervisor (no torch), and the ranks it owns."""
