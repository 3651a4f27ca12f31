"""Who broke the group. Pure: what was seen of each rank goes in, the fault comes out.

A rank that dies takes its neighbours along: their collectives fail a moment later, and they say so
louder than the dead one can. So evidence is ranked by how near it is to a cause.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from batchtp.errors import RankFaultError
from batchtp.worker.messages import RankFault

# What a rank's traceback holds when it only felt a neighbour's end.
_COLLECTIVE = "torch/distributed"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one rank. `exit_status` is negative for a signal, None while it lives."""

    rank: int
    exit_status: int | None = None
    last_word: RankFault | None = None
    stopped: bool = False
    log_tail: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """Where the group was. `step` is None outside steps."""

    phase: str
    step: int | None = None


class GroupFaultError(RankFaultError):
    """The group is broken: `rank` is the culprit, `phase` and `step` where, `reason` what it did.

    `permanent` faults come back in every generation (a bad checkpoint, an impossible setting).
    `kind` and `message` are the exception's, where the rank could still tell.
    """

    def __init__(
        self, evidence: Evidence, moment: Moment, reason: str, word: RankFault | None = None
    ) -> None:
        self.rank = evidence.rank
        self.phase = word.phase if word else moment.phase
        self.step = moment.step
        self.reason = reason
        self.permanent = word.permanent if word else False
        self.kind = word.kind if word else ""
        self.message = word.message if word else ""
        where = self.phase if self.step is None else f"{self.phase} {self.step}"
        detail = word.traceback if word else evidence.log_tail
        super().__init__(
            f"rank {self.rank} {reason} ({where})" + (f"\n{detail.strip()}" if detail else "")
        )


def diagnose(
    ranks: Sequence[Evidence], moment: Moment, *, first: int, complaint: str
) -> GroupFaultError:
    """The fault to blame. `complaint` is what was noticed of rank `first`, for want of a cause."""
    by_noticing = sorted(ranks, key=lambda seen: seen.rank != first)
    for rank_nearness in (_permanent, _signalled, _raised, _aborted, _exited, _stopped):
        for seen in by_noticing:
            if reason := rank_nearness(seen):
                word = seen.last_word if rank_nearness in (_permanent, _raised) else None
                return GroupFaultError(seen, moment, reason, word)
    seen = by_noticing[0]
    if seen.last_word is not None:
        return GroupFaultError(seen, moment, _said(seen.last_word), seen.last_word)
    return GroupFaultError(seen, moment, complaint)


def late(ranks: Sequence[Evidence], moment: Moment, timeout_secs: float) -> GroupFaultError:
    """The fault when these ranks did not answer in time: a stopped one is to blame, if any."""
    first, *others = (seen.rank for seen in ranks)
    complaint = f"did not answer within {timeout_secs:g} s"
    if others:
        complaint += f"; nor did rank {', '.join(map(str, others))}"
    return diagnose(ranks, moment, first=first, complaint=complaint)


def _permanent(seen: Evidence) -> str:
    word = seen.last_word
    return _said(word) if word is not None and word.permanent else ""


def _signalled(seen: Evidence) -> str:
    # A library that aborts (SIGABRT) does so over what something else did.
    if seen.exit_status is None or seen.exit_status >= 0 or seen.exit_status == -signal.SIGABRT:
        return ""
    name = signal.Signals(-seen.exit_status).name
    hint = " (as the kernel does when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _raised(seen: Evidence) -> str:
    word = seen.last_word
    return "" if word is None or _COLLECTIVE in word.traceback else _said(word)


def _aborted(seen: Evidence) -> str:
    return "aborted (SIGABRT)" if seen.exit_status == -signal.SIGABRT else ""


def _exited(seen: Evidence) -> str:
    if seen.exit_status is None or seen.last_word is not None:
        return ""
    return f"exited with status {seen.exit_status}"


def _stopped(seen: Evidence) -> str:
    return "is stopped (SIGSTOP)" if seen.stopped else ""


def _said(word: RankFault) -> str:
    return f"raised {word.kind}: {word.message}"
