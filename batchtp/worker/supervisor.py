"""The supervisor: owns the TP group, holds every request's tokens, replaces what breaks.

One thread steps the group; callers meet it in `Unfinished` and get completions through their sinks.
When any rank faults, the whole group is killed, and the next generation computes every sequence's
tokens again, prompt and output, and goes on: a draw depends on the seed and the position alone, so
the text is the one an undisturbed run gives.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

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
from batchtp.worker.diagnosis import GroupFaultError
from batchtp.worker.engine import OnLoading, Sink, ignore_loading
from batchtp.worker.group import RANK_COMMAND, Interrupted, RankGroup
from batchtp.worker.intake import Limits, make_sequence
from batchtp.worker.messages import GroupConfig, Plan, StepResult
from batchtp.worker.output import StopWatch, completion_of, finish_reason
from batchtp.worker.placement import ModelOnDisk, group_config, step_deadline_secs
from batchtp.worker.restarts import RestartPolicy
from batchtp.worker.scheduler import Scheduler
from batchtp.worker.unfinished import Job, Unfinished

log = logging.getLogger(__name__)

# Far above what ending takes: a poll of the group's waits, and its ranks' last moments.
_END_SECS = 60.0


class Supervisor:
    """The real Engine. `start` returns once the first generation can take work.

    `rank_command` is what runs a rank, to which `--fd N` is added. `restarts` replaces the policy
    that the settings ask for.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rank_command: Items[str] = RANK_COMMAND,
        restarts: RestartPolicy | None = None,
    ) -> None:
        self._settings = settings
        self._on_loading: OnLoading = ignore_loading
        self._command = tuple(rank_command)
        self._restarts = restarts or RestartPolicy(settings.max_restarts)
        self._jobs = Unfinished()
        self._ids = itertools.count()
        self._up = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._failure: EngineError | ModelError | None = None
        self._generation = 0
        self._step = 0
        self._plan: Plan | None = None
        self._pids: tuple[int, ...] = ()
        self._model: ModelOnDisk
        self._config: GroupConfig
        self._limits = Limits(0, 0, 0)
        self._scheduler: Scheduler

    def start(self, on_loading: OnLoading = ignore_loading) -> None:
        """See Engine."""
        self._on_loading = on_loading
        self._model = ModelOnDisk.open(self._settings)
        self._config = group_config(self._settings, self._model)
        self._thread.start()
        self._up.wait()
        if self._failure is not None:
            raise self._failure
        if self._stopping.is_set():
            raise GroupStoppedError("The engine was stopped while it started.")

    def submit(self, requests: Items[GenerationRequest], sink: Sink) -> None:
        """See Engine. Tokenises on the caller's thread, so that steps go on meanwhile."""
        if not self._up.is_set():
            raise GroupStoppedError("The engine is not started.")
        failed: list[Completion] = []
        accepted: list[Job] = []
        for request in requests:
            try:
                accepted.append(self._prepare(request, sink))
            except RequestError as error:
                failure = Failure(error.code, error.message, error.param)
                failed.append(
                    Completion(request.key, finish_reason=FinishReason.ERROR, failure=failure)
                )
        self._jobs.add(accepted)
        for completion in failed:
            sink(completion)

    def cancel(self, keys: Collection[RequestKey]) -> None:
        """See Engine."""
        self._jobs.cancel(keys)

    def progress(self, keys: Collection[RequestKey]) -> Mapping[RequestKey, int]:
        """See Engine."""
        return self._jobs.progress(keys)

    def failure(self) -> EngineError | ModelError | None:
        """See Engine."""
        return self._failure

    def info(self) -> EngineInfo:
        """See Engine. Raises GroupStoppedError before `start`."""
        if not self._up.is_set():
            raise GroupStoppedError("The engine is not started.")
        return EngineInfo(
            model=self._model.served_name,
            tp=self._settings.tp,
            device=self._model.device,
            dtype=self._model.dtype,
            max_model_len=self._limits.context,
            max_sequences=self._settings.max_sequences,
            kv_blocks=self._config.kv_blocks,
            block_size=self._settings.block_size,
            generation=self._generation,
            ready=bool(self._pids) and not self._stopping.is_set(),
            restarts=self._generation - 1,
            rank_pids=self._pids,
        )

    def stop(self, grace_secs: float) -> None:
        """See Engine."""
        self._jobs.close("The engine is stopping and takes no more requests.")
        if self._up.is_set():
            self._jobs.wait(grace_secs)
        self._stopping.set()
        self._jobs.wakeup.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECS)

    def _prepare(self, request: GenerationRequest, sink: Sink) -> Job:
        tokenizer, stops = self._model.tokenizer, request.sampling.stop
        sequence = make_sequence(next(self._ids), request, tokenizer, self._limits)
        return Job(sequence, sink, StopWatch(tokenizer, stops) if stops else None)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._serve()
                except GroupFaultError as fault:
                    self._recover(fault)
        except Interrupted:
            return
        except (EngineError, ModelError) as error:
            self._fail(error)
        except BaseException as error:
            self._fail(EngineError(f"The supervisor failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._pids = ()
            self._jobs.abandon()
            self._up.set()

    def _serve(self) -> None:
        """One generation, from its start to its fault or to the engine's stop."""
        self._generation += 1
        with RankGroup(
            self._config,
            self._generation,
            self._command,
            self._stopping.is_set,
            self._on_loading,
        ) as group:
            self._bring_up(group)
            deadline_secs = step_deadline_secs(self._settings, self._model.device)
            while not self._stopping.is_set():
                self._take_jobs()
                self._plan = self._scheduler.plan(group.generation, self._step)
                if self._plan is None:
                    group.idle(self._jobs.wakeup)
                    continue
                self._step += 1
                result = group.step(self._plan, deadline_secs)
                self._apply(self._plan, result)

    def _bring_up(self, group: RankGroup) -> None:
        started = time.monotonic()
        ready, blocks = group.start(self._settings.startup_timeout_secs)
        pool = BlockPool(blocks, self._settings.block_size)
        if self._up.is_set():
            self._scheduler.restart(pool)
        else:
            self._open(pool, Limits(ready.max_model_len, pool.tokens, ready.vocab_size))
        self._pids = group.pids
        log.info(
            "group is up",
            extra={
                "generation": group.generation,
                "tp": self._settings.tp,
                "kv_blocks": blocks,
                "secs": round(time.monotonic() - started, 3),
                "load_secs": round(ready.load_secs, 3),
                "weight_gib": round(ready.weight_bytes / 2**30, 3),
                "host_peak_gib": round(ready.host_peak_bytes / 2**30, 3),
                "device_peak_gib": round(ready.device_peak_bytes / 2**30, 3),
            },
        )
        self._up.set()
        # Who started the engine has stopped listening.
        self._on_loading = ignore_loading

    def _open(self, pool: BlockPool, limits: Limits) -> None:
        """What the first generation settles for all: a cache of another size would break limits."""
        self._config = replace(self._config, kv_blocks=pool.count)
        self._limits = limits
        self._scheduler = Scheduler(
            pool,
            max_sequences=self._settings.max_sequences,
            max_batched_tokens=self._settings.max_batched_tokens,
            chunked_prefill=self._settings.chunked_prefill,
        )
        if limits.cache < limits.context:
            log.warning(
                "the KV cache holds %d tokens, fewer than the context of %d: "
                "longer requests end at the cache's size",
                limits.cache,
                limits.context,
            )

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
                f"{self._restarts.window_secs:g} s and faulted again: {fault}"
            ) from fault
        self._stopping.wait(wait_secs)

    def _accuse(self, plan: Plan) -> None:
        """Only a sequence that was alone is sure to be the cause."""
        self._scheduler.accuse(
            (self._jobs[part.sequence_id].sequence, part) for part in plan.slices
        )
        suspect = self._jobs[plan.slices[0].sequence_id]
        faults = suspect.sequence.faults
        if len(plan.slices) == 1 and faults >= self._settings.max_attempts:
            message = f"The group faulted {faults} times on this request, and on it alone."
            self._finish(suspect, FinishReason.ERROR, Failure("engine_fault", message))
            # The restart that follows is its doing too, but is not counted yet.
            self._restarts.forgive(faults - 1)

    def _take_jobs(self) -> None:
        new, cancelled = self._jobs.take()
        for job in new:
            self._scheduler.add(job.sequence)
        for job in cancelled:
            self._finish(job, FinishReason.CANCELLED)

    def _apply(self, plan: Plan, result: StepResult) -> None:
        """The step is done: note what is in the cache, take the tokens, end who is finished."""
        self._plan = None
        tokens = dict(result.tokens)
        for part in plan.slices:
            job = self._jobs[part.sequence_id]
            token = tokens.get(part.sequence_id)
            if token is not None:
                job.sequence.output_ids.append(token)
            self._scheduler.advance(job.sequence, part)
            if token is not None:
                self._check_stop(job, token)
        for number in result.bad:
            failure = Failure("nonfinite_logits", "The model's output was not finite (NaN or inf).")
            self._finish(self._jobs[number], FinishReason.ERROR, failure)

    def _check_stop(self, job: Job, token: int) -> None:
        stopped = job.stop_watch is not None and job.stop_watch.push(token)
        reason = finish_reason(job.sequence, stopped)
        if reason is not None:
            self._finish(job, reason)

    def _finish(self, job: Job, reason: FinishReason, failure: Failure | None = None) -> None:
        self._scheduler.remove(job.sequence)
        tokenizer = self._model.tokenizer
        completion = completion_of(job.sequence, reason, tokenizer, self._generation, failure)
        job.sink(completion)
        self._jobs.remove(job)

    def _fail(self, error: EngineError | ModelError) -> None:
        self._jobs.close(f"The engine has given up and takes no more requests: {error}")
        self._failure = error


def _lasting_error(fault: GroupFaultError) -> EngineError | ModelError:
    """What ends the engine: the rank's own error where it names a fault of the checkpoint."""
    kind = getattr(errors, fault.kind, None) if fault.permanent else None
    if isinstance(kind, type) and issubclass(kind, ModelError):
        return kind(fault.message)
    return GroupStartError(str(fault))
