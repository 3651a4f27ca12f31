"""One rank as the supervisor sees it: a process, its socket, and what it printed.

Exec'd, never forked. The thread that starts a rank must outlive it: ranks ask the kernel to kill
them when the thread that started them ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from batchtp.worker.diagnosis import Evidence
from batchtp.worker.messages import FrameBuffer, FromRank, RankFault

log = logging.getLogger(__name__)

# How much of what a rank printed a fault quotes.
_TAIL_BYTES = 4000
_READ_BYTES = 1 << 20


class RankProcess:
    """Spawned by its constructor; `close` after it was reaped."""

    def __init__(self, number: int, command: Sequence[str]) -> None:
        self.number = number
        self.last_word: RankFault | None = None
        self._inbox = FrameBuffer()
        self._tail = b""
        self._unfinished_line = b""
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.output, output = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.output, False)
        try:
            self._process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        except BaseException:
            self.sock.close()
            os.close(self.output)
            raise
        finally:
            theirs.close()
            os.close(output)
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def write(self, frame: bytes, timeout_secs: float) -> None:
        """Send a whole frame. Raises TimeoutError, or OSError when the rank is gone."""
        self.sock.settimeout(timeout_secs)
        self.sock.sendall(frame)

    def read(self) -> list[FromRank] | None:
        """Messages that are there now, without waiting; None at the end of the stream.

        A RankFault among them is kept as the rank's last word.
        """
        self.sock.setblocking(False)
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        messages = self._inbox.feed(data)
        for message in messages:
            if isinstance(message, RankFault):
                self.last_word = message
        return messages

    def read_output(self) -> bool:
        """Log what the rank printed since; False at its end."""
        try:
            data = os.read(self.output, _READ_BYTES)
        except BlockingIOError:
            return True
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        *lines, self._unfinished_line = (self._unfinished_line + data)[-_READ_BYTES:].split(b"\n")
        for line in lines:
            log.info("rank %d: %s", self.number, line.decode("utf-8", "replace"))
        return bool(data)

    def evidence(self) -> Evidence:
        """What is known of it now."""
        self.read_output()
        return Evidence(
            rank=self.number,
            exit_status=self._process.poll(),
            last_word=self.last_word,
            stopped=_is_stopped(self.pid),
            log_tail=self._tail.decode("utf-8", "replace"),
        )

    def kill(self) -> None:
        """SIGKILL; nothing when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def reap(self, timeout_secs: float) -> bool:
        """Wait for its end; False when the kernel still holds it after the time."""
        try:
            self._process.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Let its descriptors go."""
        self.sock.close()
        os.close(self.output)
        os.close(self.pidfd)


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The name may hold anything, parentheses too; the state follows its last one.
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
