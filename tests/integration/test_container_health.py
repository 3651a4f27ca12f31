"""The container's health check follows what the worker itself announces."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from batchtp.queue import workers
from batchtp.queue.submit import connect
from batchtp.settings import Settings
from batchtp.worker import health


@pytest.fixture
def check(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    for name in ("home", "redis_url", "database_url", "key_prefix"):
        monkeypatch.setenv(f"BATCHTP_{name.upper()}", getattr(settings, name))
    return health.main


def test_healthy_from_announcement_to_withdrawal(
    check: Callable[[], int], settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = f"{socket.gethostname()}-7-abcdef"
    assert check() == 1
    assert "No worker" in capsys.readouterr().out
    with connect(settings) as client:
        workers.announce(client, settings, worker, "some-model")
        assert check() == 0
        assert worker in capsys.readouterr().out
        workers.withdraw(client, settings, worker)
    assert check() == 1


def test_another_host_does_not_make_this_one_healthy(
    check: Callable[[], int], settings: Settings
) -> None:
    with connect(settings) as client:
        workers.announce(client, settings, "another-host-7-abcdef", "some-model")
    assert check() == 1


def test_unreachable_broker_is_unhealthy(
    check: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("BATCHTP_REDIS_URL", f"redis+socket://{tmp_path}/none.sock")
    assert check() == 1
    assert "does not answer" in capsys.readouterr().out
