"""The embedded Postgres and Valkey: found in pip packages, run on the data directory.

A keeper process owns both servers. Whoever needs them holds a shared lock on the data directory;
when the last holder is gone, killed or not, the keeper stops them (unless `up` asked it to stay).
"""

from batchtp.services.attach import (
    Endpoints,
    ServicesStatus,
    down,
    ensure,
    release,
    started_here,
    status,
    up,
)

__all__ = [
    "Endpoints",
    "ServicesStatus",
    "down",
    "ensure",
    "release",
    "started_here",
    "status",
    "up",
]
