"""A rank: one process, one device, one share of the model.

Started as `python -m batchtp.worker.rank --fd N --parent PID`: N is its end of a connected Unix
socket to the supervisor, whose process id is PID; worker.messages has the protocol.

A rank never outlives its supervisor: PR_SET_PDEATHSIG, which Linux ties to the *thread* that
started the process, so that thread has to live as long as the group. It ignores SIGINT and SIGTERM,
which a terminal or systemd sends to the whole process group while the supervisor still lets
requests finish. Every way out is os._exit: a collective library can hang in its own clean-up.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, NoReturn, TypeVar

from batchtp.errors import ModelError, UsageError
from batchtp.worker.messages import (
    FromRank,
    Hello,
    Loading,
    Plan,
    RankFault,
    Ready,
    Shutdown,
    StartCache,
    StepResult,
    receive,
    send,
)

if TYPE_CHECKING:
    from batchtp.worker.runner import Runner
    from batchtp.worker.startup import LoadedShard

_PR_SET_PDEATHSIG = 1
_Message = TypeVar("_Message", Hello, StartCache, Plan)


class Rank:
    """Serves one supervisor over one socket. `phase` is what a fault will be blamed on."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._number = -1
        self._generation = -1
        self._phase = "start"

    def run(self) -> int:
        """Serve until Shutdown or until the supervisor is gone; gives the exit status."""
        try:
            self._serve()
        except (EOFError, ConnectionError):
            # Told to stop, or nobody is left to report to.
            return 0
        except Exception as error:
            traceback.print_exc()
            self._report(error)
            return 1
        return 0

    def _serve(self) -> None:
        # Here and not at the top: importing torch takes seconds, in which a parent can die.
        from batchtp.worker import startup

        hello = self._receive(Hello)
        self._number, self._generation = hello.rank, hello.generation
        self._phase = "join"
        group, device = startup.join_group(hello)
        self._phase = "load"
        started = time.monotonic()
        loaded = startup.load(hello, group, device, self._loading)
        self._send(self._ready(loaded, time.monotonic() - started))
        start = self._receive(StartCache)
        self._phase = "cache"
        runner = startup.make_runner(loaded, hello.config, start.kv_blocks)
        self._phase = "step"
        while True:
            plan = self._receive(Plan)
            # A plan of another generation is meant for a group that no longer exists.
            if plan.generation == self._generation:
                self._send(self._step(runner, plan))

    def _step(self, runner: Runner, plan: Plan) -> StepResult:
        started = time.monotonic()
        drawn = runner.step(plan)
        return StepResult(
            rank=self._number,
            generation=self._generation,
            step=plan.step,
            tokens=drawn.tokens,
            bad=drawn.bad,
            compute_secs=time.monotonic() - started,
        )

    def _loading(self, done: float) -> None:
        self._send(Loading(self._number, self._generation, done))

    def _ready(self, loaded: LoadedShard, load_secs: float) -> Ready:
        return Ready(
            rank=self._number,
            generation=self._generation,
            kv_blocks=loaded.kv_blocks,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.decoder.config.vocab_size,
            weight_bytes=loaded.weight_bytes,
            load_secs=load_secs,
            host_peak_bytes=loaded.host_peak_bytes,
            device_peak_bytes=loaded.device_peak_bytes,
        )

    def _receive(self, kind: type[_Message]) -> _Message:
        """The next message, of this kind by protocol. Raises EOFError on Shutdown."""
        message = receive(self._sock)
        if isinstance(message, Shutdown):
            raise EOFError("the supervisor said to stop")
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message!r}"
        return message

    def _send(self, message: FromRank) -> None:
        send(self._sock, message)

    def _report(self, error: Exception) -> None:
        fault = RankFault(
            rank=self._number,
            generation=self._generation,
            phase=self._phase,
            kind=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            permanent=isinstance(error, ModelError | UsageError),
        )
        with contextlib.suppress(OSError):
            self._send(fault)


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL this process when the thread that started it ends; exit if it already has.

    The pid comes from the parent: asked for here, it would be the adopter's after an early death.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> NoReturn:
    """Entry point of the rank process; does not return."""
    parser = argparse.ArgumentParser(prog="python -m batchtp.worker.rank")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the supervisor")
    parser.add_argument("--parent", type=int, required=True, help="the supervisor's process id")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    # Read when OpenMP is loaded, which is when torch is. Threads that spin for work take the cores
    # from whatever else runs here: with a busy machine a step takes seven times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status = Rank(socket.socket(fileno=arguments.fd)).run()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
