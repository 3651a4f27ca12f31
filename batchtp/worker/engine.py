"""The seam between the two halves: what the queue side may ask of a TP group.

`worker.supervisor.Supervisor` is the real one; `testing.fake_engine.FakeEngine` keeps to the same
protocol and the same conformance test.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

from batchtp.core import Completion, EngineInfo, GenerationRequest, RequestKey
from batchtp.errors import EngineError, ModelError

Sink: TypeAlias = Callable[[Completion], None]
#: Told the share of the weights that every rank has, 0 to 1, from any thread, one call at a time.
OnLoading: TypeAlias = Callable[[float], None]


def ignore_loading(done: float) -> None:
    """For who does not want to know how far the model has loaded."""


class Engine(Protocol):
    """A long-lived generator of completions. Every method may be called from any thread."""

    def start(self, on_loading: OnLoading = ignore_loading) -> None:
        """Bring the group up; return when it can take work. `on_loading` hears of it.

        Raises `ModelError` or `GroupStartError` within the start-up budget.
        """

    def submit(self, requests: Sequence[GenerationRequest], sink: Sink) -> None:
        """Take requests. `sink` gets exactly one completion for each, from any thread.

        The sink must not block. A request that cannot run ends as a completion with a failure
        (prompt_too_long, empty_prompt, template errors, …), never as an exception here.
        Raises `GroupStoppedError` when the engine is stopping or stopped.
        """

    def cancel(self, keys: Collection[RequestKey]) -> None:
        """Stop these; the unfinished ones end with finish reason `cancelled`, tokens kept."""

    def progress(self, keys: Collection[RequestKey]) -> Mapping[RequestKey, int]:
        """Tokens generated so far for those of `keys` that are unfinished."""

    def failure(self) -> EngineError | ModelError | None:
        """Why the engine gave up for good; None while it works. Its requests get no completion."""

    def info(self) -> EngineInfo:
        """A snapshot for status, health and logs."""

    def stop(self, grace_secs: float) -> None:
        """Take no more work, give running requests `grace_secs`, then end every rank.

        Requests still unfinished get no completion: their lease is handed back by the caller.
        """
