"""Which workers are alive and what they serve, told through Redis keys that expire."""

from __future__ import annotations

import json
from typing import Any

import redis

from batchtp.settings import Settings

# Three missed beats make a worker dead.
BEAT_SECS = 5.0
_TTL_MILLISECS = int(BEAT_SECS * 3000)


def announce(
    client: redis.Redis, settings: Settings, worker: str, model: str, loaded: float = 1.0
) -> None:
    """This worker serves this model, as of now; with `loaded` below 1 it is still on its way."""
    said = json.dumps({"model": model, "loaded": round(loaded, 4)})
    client.set(_key(settings, worker), said, px=_TTL_MILLISECS)


def withdraw(client: redis.Redis, settings: Settings, worker: str) -> None:
    """This worker takes no more work."""
    client.delete(_key(settings, worker))


def served_models(client: redis.Redis, settings: Settings) -> frozenset[str]:
    """Models that some live worker serves."""
    return frozenset(said["model"] for said in _said(client, settings) if said["loaded"] >= 1)


def loaded_share(client: redis.Redis, settings: Settings, model: str) -> float | None:
    """How far the worker that will serve this model first has loaded; None when there is none."""
    shares = [said["loaded"] for said in _said(client, settings) if said["model"] == model]
    return max(shares, default=None)


def _said(client: redis.Redis, settings: Settings) -> list[dict[str, Any]]:
    keys = list(client.scan_iter(match=_key(settings, "*"), count=500))
    found = client.mget(keys) if keys else []
    assert isinstance(found, list)
    return [json.loads(value) for value in found if value is not None]


def _key(settings: Settings, worker: str) -> str:
    return f"{settings.key_prefix}:worker:{worker}"
