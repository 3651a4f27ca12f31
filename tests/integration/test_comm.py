"""The group's collectives between real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PEER = Path(__file__).with_name("comm_peer.py")
DEADLINE_SECS = 120


def run_peers(size: int, meeting: Path, prefix: tuple[str, ...] = ()) -> None:
    peers = [
        subprocess.Popen(
            [*prefix, sys.executable, str(PEER), str(rank), str(size), str(meeting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    for peer in peers:
        output, _ = peer.communicate(timeout=DEADLINE_SECS)
        assert peer.returncode == 0, output
        assert output.endswith("done\n")


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_in_rank_order_whatever_their_size(size: int, tmp_path: Path) -> None:
    run_peers(size, tmp_path / "meeting")


def test_a_hostname_that_does_not_resolve_is_no_obstacle(tmp_path: Path) -> None:
    script = 'hostname no-such-host.invalid && exec "$@"'
    prefix = ("unshare", "--uts", "--map-root-user", "sh", "-c", script, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("this user may not change the hostname in a namespace of its own")
    run_peers(2, tmp_path / "meeting", prefix)
