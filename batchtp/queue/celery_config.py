"""Celery's and redis-py's settings. With their defaults a worker behind a silent network hole stays
deaf for ever, a killed worker's message waits for minutes, and prompts show in events.
"""

from __future__ import annotations

import re
import ssl
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from celery import Celery

from batchtp.errors import SettingsError
from batchtp.settings import Settings

INTAKE_TASK = "batchtp.intake"
SEAL_TASK = "batchtp.seal"
GENERATE_TASK = "batchtp.generate"
# Prompts must not show in events, logs or monitors, which all print a task's arguments.
HIDDEN_ARGUMENTS = "<hidden>"


def make_celery(settings: Settings) -> Celery:
    """An application bound to the settings' broker. Connects to nothing yet.

    Raises SettingsError when there is no broker URL.
    """
    if not settings.redis_url:
        raise SettingsError("No broker: redis_url is not set and no embedded service was started.")
    app = Celery("batchtp")
    app.conf.update(celery_settings(settings))
    return app


def celery_settings(settings: Settings) -> dict[str, Any]:
    """Every setting that is not Celery's default, with its reason."""
    return {
        "broker_url": broker_url(settings.redis_url),
        "broker_transport_options": {
            "global_keyprefix": f"{settings.key_prefix}:",
            "visibility_timeout": settings.visibility_timeout_secs,
            # How soon a dead worker's messages are looked for: they wait for the visibility
            # timeout and no longer.
            "unacked_restore_interval": 2,
            "unacked_restore_throttle": 1,
            # A publisher gives up instead of trying to connect for ever.
            "max_retries": 3,
            "interval_start": 0.2,
            "interval_step": 0.3,
            "interval_max": 1.0,
            **socket_options(),
        },
        "redis_socket_timeout": 10,
        "redis_socket_connect_timeout": 5,
        "redis_socket_keepalive": True,
        "redis_backend_health_check_interval": 10,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_pool_limit": 4,
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "result_backend": None,
        "task_ignore_result": True,
        "task_acks_late": True,
        "task_acks_on_failure_or_timeout": False,
        "task_create_missing_queues": True,
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_enable_remote_control": False,
        "worker_send_task_events": False,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "event_queue_prefix": f"{settings.key_prefix}.events",
        "task_default_queue": intake_queue(settings),
        "task_default_priority": None,
    }


def socket_options() -> dict[str, Any]:
    """Bounds on every wait for the broker."""
    return {
        "socket_timeout": 10,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": 10,
    }


def broker_url(url: str) -> str:
    """Celery's spelling of a redis URL: unix:// becomes redis+socket://, rediss:// checks certs."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"redis+socket://{url.partition('://')[2].replace('db=', 'virtual_host=')}"
    if parts.scheme == "rediss" and "ssl_cert_reqs" not in parts.query:
        query = f"{parts.query}&" if parts.query else ""
        return urlunsplit(parts._replace(query=f"{query}ssl_cert_reqs={ssl.CERT_REQUIRED.name}"))
    return url


def redis_py_url(url: str) -> str:
    """redis-py's spelling: redis+socket:// becomes unix://, virtual_host becomes db."""
    scheme, _, rest = url.partition("://")
    if scheme != "redis+socket":
        return url
    return f"unix://{rest.replace('virtual_host=', 'db=')}"


def intake_queue(settings: Settings) -> str:
    """The queue of submissions."""
    return f"{settings.key_prefix}.intake"


def generate_queue(settings: Settings, model: str) -> str:
    """The queue of a model's doorbells."""
    return f"{settings.key_prefix}.generate.{re.sub(r'[^A-Za-z0-9_.-]', '_', model)}"
