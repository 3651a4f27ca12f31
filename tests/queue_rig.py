"""Worker processes with a fake engine on real services, and ways to hurt them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from batchtp.settings import Settings

MODEL = "fake"
DEADLINE_SECS = 60.0
# At the 20 tokens a second of a held worker this takes longer than any test.
LONG = "x" * 3000

_SCRIPT = Path(__file__).parent / "integration" / "fake_worker.py"


def wait_for(condition: Callable[[], Any], what: str, timeout_secs: float = DEADLINE_SECS) -> Any:
    """What the condition gives, once that is true; AssertionError after the deadline."""
    deadline = time.monotonic() + timeout_secs
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come about in {timeout_secs:g} s"
        time.sleep(0.05)
    return found


def quick(settings: Settings) -> Settings:
    """The settings with every wait that a test has to sit through made short."""
    return replace(
        settings,
        model=MODEL,
        served_name=MODEL,
        chunk_requests=4,
        lease_secs=2.0,
        heartbeat_secs=0.2,
        sweep_secs=0.5,
        visibility_timeout_secs=4.0,
        grace_secs=1.0,
    )


class Worker:
    """A worker process, and the switches of its engine."""

    def __init__(self, settings: Settings, folder: Path, *, hold: bool, fail: bool) -> None:
        self._folder = folder
        folder.mkdir()
        if hold:
            (folder / "hold").touch()
        if fail:
            self.fail()
        flags = folder / "settings.json"
        values = {f.name: getattr(settings, f.name) for f in fields(settings)}
        flags.write_text(json.dumps({k: v for k, v in values.items() if k != "sources"}))
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(_SCRIPT), str(flags), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def release(self) -> None:
        """Answer at once from now on."""
        (self._folder / "hold").unlink()

    def fail(self) -> None:
        """The engine gives up for good."""
        (self._folder / "fail").touch()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_SECS)

    def log(self) -> str:
        """What it has written so far."""
        return (self._folder / "log").read_text(errors="replace")


def run_celery(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Celery's own command line on the app of the environment."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("BATCHTP_")}
    for name in ("home", "redis_url", "database_url", "key_prefix", "served_name"):
        environ[f"BATCHTP_{name.upper()}"] = getattr(settings, name)
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", "batchtp.worker.app", "worker", *arguments],
        capture_output=True,
        text=True,
        env=environ,
        timeout=DEADLINE_SECS,
        check=False,
    )
