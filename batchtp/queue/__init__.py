"""The path from a file of prompts to messages, and what Celery must be told."""
