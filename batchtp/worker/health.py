"""Is this host's worker serving? `python -m batchtp.worker.health`; exit code 0: yes.

A worker announces itself every few seconds from the moment its tensor-parallel group is up until it
drains or its engine gives up, and an announcement expires. So this fails for a worker that is alive
and does nothing: one that still loads, has lost its group for good, is frozen, or cannot reach the
broker.
"""

from __future__ import annotations

import socket
import sys

import redis

from batchtp.queue.submit import connect
from batchtp.settings import load_settings


def main() -> int:
    """Look for the announcement of a worker on this host; print what was found."""
    settings = load_settings()
    host = socket.gethostname()
    pattern = f"{settings.key_prefix}:worker:{host}-*"
    try:
        with connect(settings) as client:
            announced = next(client.scan_iter(match=pattern, count=500), None)
    except redis.RedisError as error:
        print(f"The broker does not answer: {error}")
        return 1
    if announced is None:
        print(f"No worker on {host} has announced itself lately.")
        return 1
    print(f"{announced.decode()} is serving.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
