"""How often a group may be replaced, and how long each replacement waits."""

from __future__ import annotations

from batchtp.worker.restarts import RestartPolicy


def test_restarts_come_further_and_further_apart() -> None:
    policy = RestartPolicy(6)
    assert [policy.next_delay(at) for at in range(7)] == [0.0, 1.0, 5.0, 30.0, 30.0, 30.0, None]


def test_old_restarts_do_not_count() -> None:
    policy = RestartPolicy(1, window_secs=600.0)
    assert policy.next_delay(0.0) == 0.0
    assert policy.next_delay(600.0) is None
    assert policy.next_delay(600.1) == 0.0


def test_no_restart_at_all() -> None:
    assert RestartPolicy(0).next_delay(0.0) is None


def test_restarts_that_one_request_caused_do_not_count_once_it_is_gone() -> None:
    policy = RestartPolicy(3)
    assert [policy.next_delay(0.0) for _ in range(3)] == [0.0, 1.0, 5.0]
    policy.forgive(2)
    assert [policy.next_delay(1.0) for _ in range(3)] == [1.0, 5.0, None]
    policy.forgive(99)
    assert policy.next_delay(2.0) == 0.0
