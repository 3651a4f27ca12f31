"""Who gets the blame when several ranks go down together."""

from __future__ import annotations

import pytest

from batchtp.worker.diagnosis import Evidence, Moment, diagnose, late
from batchtp.worker.messages import RankFault

STEP = Moment("step", 7)
FELT = 'File ".../torch/distributed/distributed_c10d.py"\nRuntimeError: Connection closed by peer'


def word(
    rank: int, kind: str = "ValueError", trace: str = "", permanent: bool = False
) -> RankFault:
    return RankFault(rank, 1, "step", kind, "a message", trace, permanent)


CASES = {
    "a kill before the neighbour that felt it": (
        [Evidence(0, 1, word(0, trace=FELT)), Evidence(1, -9)],
        (1, "was killed by SIGKILL"),
    ),
    "an exit before the neighbour that felt it": (
        [Evidence(0, 1, word(0, trace=FELT)), Evidence(1, 3)],
        (1, "exited with status 3"),
    ),
    "an exception before the neighbour that felt it": (
        [Evidence(0, 1, word(0, "RuntimeError", FELT)), Evidence(1, 1, word(1))],
        (1, "raised ValueError: a message"),
    ),
    "an exception before the neighbour that aborted": (
        [Evidence(0, -6), Evidence(1, 1, word(1))],
        (1, "raised ValueError: a message"),
    ),
    "a permanent fault before all": (
        [Evidence(0, -9), Evidence(1, 1, word(1, "CheckpointError", permanent=True))],
        (1, "raised CheckpointError"),
    ),
    "a stopped rank before one that waits for it": (
        [Evidence(0, 1, word(0, trace=FELT)), Evidence(1, stopped=True)],
        (1, "is stopped (SIGSTOP)"),
    ),
    "a broken collective when there is nothing else": (
        [Evidence(0, 1, word(0, "RuntimeError", FELT)), Evidence(1)],
        (0, "raised RuntimeError"),
    ),
    "a complaint when nothing is known": ([Evidence(0), Evidence(1)], (0, "closed its socket")),
    "the first noticed of two killed": ([Evidence(1, -11), Evidence(0, -11)], (0, "SIGSEGV")),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_nearest_to_the_cause_is_blamed(case: str) -> None:
    ranks, (culprit, reason) = CASES[case]
    fault = diagnose(ranks, STEP, first=0, complaint="closed its socket")
    assert fault.rank == culprit
    assert reason in fault.reason
    assert f"rank {culprit} " in str(fault)
    assert "(step 7)" in str(fault)


def test_what_a_rank_printed_or_its_traceback_is_quoted_once() -> None:
    printed = diagnose([Evidence(0, 3, log_tail="boom\n")], STEP, first=0, complaint="exited")
    assert str(printed).endswith("\nboom")
    raised = Evidence(0, 1, word(0, trace="Traceback"), log_tail="Traceback")
    assert str(diagnose([raised], STEP, first=0, complaint="")).count("Traceback") == 1


def test_late_names_the_stopped_one_or_all() -> None:
    fault = late([Evidence(0), Evidence(1)], Moment("start"), 2.0)
    assert fault.reason == "did not answer within 2 s; nor did rank 1"
    fault = late([Evidence(0), Evidence(1, stopped=True)], STEP, 2.0)
    assert (fault.rank, fault.reason) == (1, "is stopped (SIGSTOP)")
