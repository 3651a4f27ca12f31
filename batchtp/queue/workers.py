"""Which workers are alive and what they serve, told through Redis keys that expire."""

from __future__ import annotations

import json

import redis

from batchtp.settings import Settings

# Three missed beats make a worker dead.
BEAT_SECS = 5.0
_TTL_MILLISECS = int(BEAT_SECS * 3000)


def announce(client: redis.Redis, settings: Settings, worker: str, model: str) -> None:
    """This worker serves this model, as of now."""
    client.set(_key(settings, worker), json.dumps({"model": model}), px=_TTL_MILLISECS)


def withdraw(client: redis.Redis, settings: Settings, worker: str) -> None:
    """This worker takes no more work."""
    client.delete(_key(settings, worker))


def served_models(client: redis.Redis, settings: Settings) -> frozenset[str]:
    """Models that some live worker serves."""
    keys = list(client.scan_iter(match=_key(settings, "*"), count=500))
    found = client.mget(keys) if keys else []
    assert isinstance(found, list)
    return frozenset(json.loads(value)["model"] for value in found if value is not None)


def _key(settings: Settings, worker: str) -> str:
    return f"{settings.key_prefix}:worker:{worker}"
