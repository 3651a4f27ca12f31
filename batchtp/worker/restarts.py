"""How often and how fast a group may be replaced."""

from __future__ import annotations

from collections import deque

# The first restart is free: most faults do not come back. Later ones give a driver, a machine or an
# operator time.
_DELAYS_SECS = (0.0, 1.0, 5.0, 30.0)


class RestartPolicy:
    """At most `limit` restarts in `window_secs`; the nth of them waits `delays_secs[n]`."""

    def __init__(
        self,
        limit: int,
        window_secs: float = 600.0,
        delays_secs: tuple[float, ...] = _DELAYS_SECS,
    ) -> None:
        self.limit = limit
        self.window_secs = window_secs
        self._delays_secs = delays_secs
        self._times: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before this restart; None when there were too many."""
        while self._times and now - self._times[0] > self.window_secs:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return None
        self._times.append(now)
        return self._delays_secs[min(len(self._times), len(self._delays_secs)) - 1]

    def forgive(self, count: int) -> None:
        """The last so many restarts were one request's doing, and that request is gone."""
        for _ in range(min(count, len(self._times))):
            self._times.pop()
