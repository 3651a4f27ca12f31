"""The embedded services: started once, shared, and gone with their last user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from batchtp import services
from batchtp.errors import EmbeddedServiceError
from batchtp.services import Endpoints
from batchtp.settings import Settings, load_settings

USER = """
import sys
import tempfile
from batchtp import services
from batchtp.settings import load_settings
print(services.ensure(load_settings({"home": sys.argv[1]}, environ={})).redis_url, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Settings]:
    """Settings with a home of their own and no URLs; its services are stopped at the end."""
    settings = load_settings({"home": str(tmp_path / "home")}, environ={})
    yield settings
    services.release(settings)
    services.down(settings)


def wait(condition: Callable[[], bool], timeout_secs: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_secs
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def server_pids(settings: Settings) -> dict[str, int]:
    return dict(services.status(settings).pids)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def start_user(settings: Settings) -> subprocess.Popen[str]:
    user = subprocess.Popen(
        [sys.executable, "-c", USER, settings.home],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdout is not None
    assert user.stdout.readline().startswith("redis+socket://")
    return user


def end(user: subprocess.Popen[str]) -> None:
    user.kill()
    user.wait()
    for stream in (user.stdin, user.stdout):
        if stream is not None:
            stream.close()


def ask(endpoints: Endpoints, sql: str) -> object:
    with psycopg.connect(endpoints.database_url.replace("+psycopg", "")) as connection:
        row = connection.execute(sql).fetchone() if sql.startswith("select") else None
        if row is None and not sql.startswith("select"):
            connection.execute(sql)
        return row and row[0]


def valkey(endpoints: Endpoints) -> redis.Redis:
    path = endpoints.redis_url.removeprefix("redis+socket://").partition("?")[0]
    return redis.Redis(unix_socket_path=path)


def test_urls_of_the_settings_start_nothing(tmp_path: Path) -> None:
    flags = {"home": str(tmp_path), "redis_url": "redis://r", "database_url": "postgresql://p"}
    settings = load_settings(flags, environ={})
    assert services.ensure(settings) == Endpoints("redis://r", "postgresql://p")
    assert not services.status(settings).running
    assert list(tmp_path.iterdir()) == []


def test_data_outlives_the_servers(own: Settings) -> None:
    first = services.ensure(own)
    ask(first, "create table t as select 7 as x")
    with valkey(first) as client:
        client.set("k", "v")
    services.release(own)
    assert not services.status(own).running
    second = services.ensure(own)
    assert ask(second, "select x from t") == 7
    with valkey(second) as client:
        assert client.get("k") == b"v"


def test_no_tcp_port_is_opened(own: Settings) -> None:
    services.ensure(own)
    for pid in server_pids(own).values():
        assert psutil.Process(pid).net_connections("inet") == []


def test_the_last_user_that_is_killed_takes_the_servers_along(own: Settings) -> None:
    one, other = start_user(own), start_user(own)
    pids = [*server_pids(own).values(), services.status(own).keeper_pid or 0]
    end(one)
    assert services.status(own).running
    end(other)
    wait(lambda: all(gone(pid) for pid in pids))
    assert not services.status(own).running


def test_a_killed_keeper_leaves_no_server_and_the_next_start_recovers(own: Settings) -> None:
    ask(services.ensure(own), "create table t as select 7 as x")
    pids = server_pids(own)
    os.kill(services.status(own).keeper_pid or 0, signal.SIGKILL)
    wait(lambda: all(gone(pid) for pid in pids.values()))
    assert ask(services.ensure(own), "select x from t") == 7


def test_killed_servers_are_started_again_with_their_data(own: Settings) -> None:
    endpoints = services.ensure(own)
    ask(endpoints, "create table t as select 7 as x")
    before = server_pids(own)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    wait(lambda: not set(server_pids(own).values()) & set(before.values()))
    assert ask(endpoints, "select x from t") == 7


def test_a_recycled_pid_in_a_stale_pid_file_does_not_stop_the_start(own: Settings) -> None:
    services.ensure(own)
    data = Path(dict(services.status(own).data)["postgres"])
    text = (data / "postmaster.pid").read_text()
    services.release(own)
    (data / "postmaster.pid").write_text("\n".join([str(os.getpid()), *text.split("\n")[1:]]))
    assert ask(services.ensure(own), "select 1") == 1


def test_up_stays_until_down(own: Settings) -> None:
    endpoints = services.up(own)
    assert services.status(own).stays
    end(start_user(own))
    assert services.ensure(own) == endpoints
    services.release(own)
    assert services.status(own).running
    assert services.down(own)
    assert not services.status(own).running
    assert not services.down(own)


def test_up_makes_running_services_stay(own: Settings) -> None:
    user = start_user(own)
    services.up(own)
    end(user)
    assert services.status(own).running


def test_many_starters_make_one_keeper(own: Settings) -> None:
    command = [sys.executable, "-c", USER, own.home]
    users = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for user in users:
        assert user.stdout is not None
        assert user.stdout.readline().startswith("redis+socket://")
    keepers = [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if "batchtp.services.keeper" in (p.info["cmdline"] or []) and own.home in p.info["cmdline"]
    ]
    for user in users:
        end(user)
    assert len(keepers) == 1


def test_a_long_home_still_gets_short_sockets(tmp_path: Path) -> None:
    settings = load_settings({"home": str(tmp_path / ("x" * 120))}, environ={})
    try:
        assert ask(services.ensure(settings), "select 1") == 1
    finally:
        services.release(settings)


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings(home=str(tmp_path / "file" / "home"))
    with pytest.raises(EmbeddedServiceError, match=r"data directory .*file/home"):
        services.ensure(settings)


def test_data_of_another_postgres_version_is_refused(own: Settings) -> None:
    services.ensure(own)
    data = Path(dict(services.status(own).data)["postgres"])
    services.release(own)
    (data / "PG_VERSION").write_text("12\n")
    with pytest.raises(EmbeddedServiceError, match="made by Postgres 12"):
        services.ensure(own)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_root_without_user_namespaces_runs_postgres_as_nobody(own: Settings) -> None:
    # The place that is chosen on such a machine; a test's own folder is closed to others.
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        Path(base).chmod(0o711)
        services_folder = own.home_path / "services"
        services_folder.mkdir(parents=True, mode=0o700)
        placement = {"identity": "nobody", "base": base}
        (services_folder / "placement.json").write_text(json.dumps(placement))
        for _ in range(2):
            assert ask(services.ensure(own), "select 1") == 1
            data = Path(dict(services.status(own).data)["postgres"])
            services.release(own)
        assert data.parent == Path(base)
        assert data.stat().st_uid == 65534


def test_data_of_a_user_is_refused_to_root_and_the_reverse(own: Settings) -> None:
    services.ensure(own)
    services.release(own)
    other = "plain" if os.getuid() == 0 else "userns"
    record = own.home_path / "services" / "placement.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "identity": other}))
    with pytest.raises(EmbeddedServiceError, match=r"was started .* before"):
        services.ensure(own)
