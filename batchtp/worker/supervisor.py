"""The supervisor: owns the TP group, holds every request's tokens, replaces what breaks.

One thread steps the group. Callers put requests and cancellations into an inbox and get
completions through their sinks. When any rank faults, the whole group is killed, and the next
generation computes every sequence's tokens again, prompt and output, and goes on: a draw depends on
the seed and the position alone, so the text is the one an undisturbed run gives.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from batchtp import errors
from batchtp.core import (
    Completion,
    EngineInfo,
    Failure,
    FinishReason,
    GenerationRequest,
    RequestKey,
)
from batchtp.errors import (
    EngineError,
    GroupStartError,
    GroupStoppedError,
    ModelError,
    RequestError,
)
from batchtp.settings import Settings
from batchtp.worker.blocks import BlockPool
from batchtp.worker.engine import Sink
from batchtp.worker.group import RANK_COMMAND, GroupFaultError, Interrupted, RankGroup
from batchtp.worker.intake import Limits, make_sequence
from batchtp.worker.messages import Plan, StepResult
from batchtp.worker.output import StopWatch, completion_of, finish_reason
from batchtp.worker.placement import ModelOnDisk, group_config
from batchtp.worker.restarts import RestartPolicy
from batchtp.worker.scheduler import Scheduler
from batchtp.worker.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    sequence: Sequence
    sink: Sink
    stop_watch: StopWatch | None


class Supervisor:
    """The real Engine. `start` returns once the first generation can take work."""

    def __init__(self, settings: Settings, *, rank_command: Items[str] = RANK_COMMAND) -> None:
        self._settings = settings
        self._command = tuple(rank_command)
        self._restarts = RestartPolicy(settings.max_restarts)
        self._lock = threading.Lock()
        self._inbox: deque[_Running] = deque()
        self._cancelled: set[RequestKey] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._up = threading.Event()
        self._draining = threading.Event()
        self._stopping = threading.Event()
        self._idle = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._failure: EngineError | ModelError | None = None
        self._next_id = 0
        self._generation = 0
        self._step = 0
        self._running: dict[int, _Running] = {}
        self._plan: Plan | None = None
        self._pids: tuple[int, ...] = ()
        self._model: ModelOnDisk
        self._limits: Limits
        self._scheduler: Scheduler | None = None

    def start(self) -> None:
        """See Engine."""
        self._model = ModelOnDisk.open(self._settings)
        self._thread.start()
        self._up.wait()
        if self._failure is not None:
            raise self._failure
        if self._stopping.is_set():
            raise GroupStoppedError("The engine was stopped while it started.")

    def submit(self, requests: Items[GenerationRequest], sink: Sink) -> None:
        """See Engine. Tokenises on the caller's thread, so that steps go on meanwhile."""
        failed: list[Completion] = []
        accepted: list[_Running] = []
        for request in requests:
            try:
                accepted.append(self._prepare(request, sink))
            except RequestError as error:
                failure = Failure(error.code, error.message, error.param)
                failed.append(
                    Completion(request.key, finish_reason=FinishReason.ERROR, failure=failure)
                )
        with self._lock:
            if self._draining.is_set() or self._failure is not None:
                raise GroupStoppedError("The engine is stopping and takes no more requests.")
            self._inbox.extend(accepted)
        self._wake()
        for completion in failed:
            sink(completion)

    def cancel(self, keys: Collection[RequestKey]) -> None:
        """See Engine."""
        with self._lock:
            self._cancelled.update(keys)
        self._wake()

    def progress(self, keys: Collection[RequestKey]) -> Mapping[RequestKey, int]:
        """See Engine."""
        wanted = set(keys)
        with self._lock:
            unfinished = [*self._running.values(), *self._inbox]
        return {
            item.sequence.key: len(item.sequence.output_ids)
            for item in unfinished
            if item.sequence.key in wanted
        }

    def failure(self) -> EngineError | ModelError | None:
        """See Engine."""
        return self._failure

    def info(self) -> EngineInfo:
        """See Engine."""
        scheduler = self._scheduler
        return EngineInfo(
            model=self._model.served_name,
            tp=self._settings.tp,
            device=self._model.device,
            dtype=self._model.dtype,
            max_model_len=self._limits.context,
            max_sequences=self._settings.max_sequences,
            kv_blocks=scheduler.pool.count if scheduler else 0,
            block_size=self._settings.block_size,
            generation=self._generation,
            ready=bool(self._pids) and self._failure is None and not self._draining.is_set(),
            restarts=max(self._generation - 1, 0),
            rank_pids=self._pids,
        )

    def stop(self, grace_secs: float) -> None:
        """See Engine."""
        self._draining.set()
        with self._idle:
            self._idle.wait_for(
                lambda: not (self._running or self._inbox) or not self._thread.is_alive(),
                grace_secs,
            )
        self._stopping.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join()

    def _prepare(self, request: GenerationRequest, sink: Sink) -> _Running:
        with self._lock:
            number = self._next_id
            self._next_id += 1
        tokenizer = self._model.tokenizer
        sequence = make_sequence(number, request, tokenizer, self._limits)
        stops = request.sampling.stop
        return _Running(sequence, sink, StopWatch(tokenizer, stops) if stops else None)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._serve()
                except GroupFaultError as fault:
                    self._recover(fault)
        except Interrupted:
            pass
        except (EngineError, ModelError) as error:
            self._fail(error)
        except BaseException as error:
            self._fail(EngineError(f"The supervisor failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._pids = ()
            self._up.set()
            with self._idle:
                self._idle.notify_all()

    def _serve(self) -> None:
        """One generation, from its start to its fault or to the engine's stop."""
        self._generation += 1
        config = group_config(self._settings, self._model)
        with RankGroup(config, self._generation, self._command) as group:
            self._start(group)
            while not self._stopping.is_set():
                self._take_inbox()
                self._plan = self._schedule().plan(group.generation, self._step)
                if self._plan is None:
                    self._rest(group)
                    continue
                self._step += 1
                result = group.step(self._plan, self._settings.step_timeout_secs)
                self._apply(self._plan, result)

    def _start(self, group: RankGroup) -> None:
        started = time.monotonic()
        ready, blocks = group.start(
            self._settings.startup_timeout_secs, interrupted=self._stopping.is_set
        )
        pool = BlockPool(blocks, self._settings.block_size)
        self._limits = Limits(ready.max_model_len, pool.tokens, ready.vocab_size)
        if self._scheduler is None:
            self._scheduler = Scheduler(
                pool,
                max_sequences=self._settings.max_sequences,
                max_batched_tokens=self._settings.max_batched_tokens,
                chunked_prefill=self._settings.chunked_prefill,
            )
        else:
            self._scheduler.restart(pool)
        self._pids = group.pids
        log.info(
            "group is up",
            extra={
                "generation": group.generation,
                "tp": self._settings.tp,
                "kv_blocks": blocks,
                "secs": round(time.monotonic() - started, 3),
            },
        )
        if pool.tokens < ready.max_model_len:
            log.warning(
                "the KV cache holds %d tokens, fewer than the context of %d: "
                "longer requests end at the cache's size",
                pool.tokens,
                ready.max_model_len,
            )
        self._up.set()

    def _recover(self, fault: GroupFaultError) -> None:
        """Note the fault, suspect who was in the step, wait as long as the restart policy says.

        Raises the error that ends the engine when a restart cannot help.
        """
        self._pids = ()
        log.error("%s", fault, extra={"generation": self._generation})
        if fault.permanent or not self._up.is_set():
            raise _lasting_error(fault) from fault
        plan, self._plan = self._plan, None
        if plan is not None:
            self._accuse(plan)
        wait_secs = self._restarts.next_delay(time.monotonic())
        if wait_secs is None:
            raise EngineError(
                f"The group was restarted {self._restarts.limit} times in "
                f"{self._restarts.window_secs:.0f} s and faulted again: {fault}"
            ) from fault
        self._stopping.wait(wait_secs)

    def _accuse(self, plan: Plan) -> None:
        members = [
            self._running[part.sequence_id]
            for part in plan.slices
            if part.sequence_id in self._running
        ]
        self._schedule().accuse(item.sequence for item in members)
        for item in members:
            if item.sequence.faults >= self._settings.max_attempts:
                message = f"The group faulted {item.sequence.faults} times on this request."
                self._finish(item, FinishReason.ERROR, Failure("engine_fault", message))

    def _rest(self, group: RankGroup) -> None:
        with self._idle:
            self._idle.notify_all()
        group.idle(self._wake_read)

    def _take_inbox(self) -> None:
        with self._lock:
            taken, cancelled = list(self._inbox), self._cancelled
            self._inbox.clear()
            self._cancelled = set()
            self._running.update((item.sequence.id, item) for item in taken)
            _drain(self._wake_read)
        for item in taken:
            self._schedule().add(item.sequence)
        if cancelled:
            for item in list(self._running.values()):
                if item.sequence.key in cancelled:
                    self._finish(item, FinishReason.CANCELLED)

    def _apply(self, plan: Plan, result: StepResult) -> None:
        """The step is done: note what is in the cache, take the tokens, end who is finished."""
        self._plan = None
        tokens = dict(result.tokens)
        for part in plan.slices:
            item = self._running[part.sequence_id]
            sequence = item.sequence
            if part.sequence_id in tokens:
                sequence.output_ids.append(tokens[part.sequence_id])
            self._schedule().advance(sequence, part)
            if part.sequence_id in tokens:
                self._check_stop(item, tokens[part.sequence_id])
        for number in result.bad:
            failure = Failure("nonfinite_logits", "The model's output was not finite (NaN or inf).")
            self._finish(self._running[number], FinishReason.ERROR, failure)

    def _check_stop(self, item: _Running, token: int) -> None:
        stopped = item.stop_watch is not None and item.stop_watch.push(token)
        reason = finish_reason(item.sequence, stopped)
        if reason is not None:
            self._finish(item, reason)

    def _finish(self, item: _Running, reason: FinishReason, failure: Failure | None = None) -> None:
        self._schedule().remove(item.sequence)
        completion = completion_of(
            item.sequence, reason, self._model.tokenizer, self._generation, failure
        )
        item.sink(completion)
        with self._lock:
            del self._running[item.sequence.id]

    def _fail(self, error: EngineError | ModelError) -> None:
        with self._lock:
            self._failure = error
        self._up.set()

    def _schedule(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            # The pipe is full of wake-ups already.
            return


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return


def _lasting_error(fault: GroupFaultError) -> EngineError | ModelError:
    """What ends the engine: the rank's own error where it names a fault of the checkpoint."""
    kind = getattr(errors, fault.kind, None) if fault.permanent else None
    if isinstance(kind, type) and issubclass(kind, ModelError):
        return kind(fault.message)
    return GroupStartError(str(fault))
