"""An engine without a model: deterministic text at once, or token by token when a test lets it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from batchtp.core import (
    Completion,
    EngineInfo,
    Failure,
    FinishReason,
    GenerationRequest,
    RequestKey,
)
from batchtp.errors import EngineError, GroupStoppedError, ModelError
from batchtp.worker.engine import OnLoading, Sink, ignore_loading

CONTEXT = 4096


@dataclass(slots=True, eq=False)
class _Job:
    request: GenerationRequest
    sink: Sink
    whole: Completion
    done: int = 0


class FakeEngine:
    """Answers `echo: <prompt>`, one token a character.

    `hold()` is a test's clock: from then on tokens come by `advance(count)`, until `release()`.
    `fail(error)` ends it as a real engine ends when its group cannot be replaced. A prompt of
    `FAIL` ends as a row with code `fake_failure`.
    """

    def __init__(self, model: str = "fake") -> None:
        self._model = model
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        self._holding = False
        self._stopped = "The engine is not started."
        self._failure: EngineError | ModelError | None = None

    def hold(self) -> None:
        """Generate only by `advance`."""
        with self._changed:
            self._holding = True

    def advance(self, tokens: int) -> None:
        """Let every held request generate so many tokens more."""
        with self._changed:
            for job in self._jobs:
                job.done += tokens
            ended = [job for job in self._jobs if job.done >= len(job.whole.token_ids)]
        self._finish(ended)

    def release(self) -> None:
        """Finish what is held, and go on answering at once."""
        with self._changed:
            self._holding = False
            ended = list(self._jobs)
        self._finish(ended)

    def fail(self, error: EngineError | ModelError) -> None:
        """Give up for good; what is held gets no completion."""
        with self._changed:
            self._failure = error
            self._stopped = f"The engine has given up and takes no more requests: {error}"
            self._jobs = []
            self._changed.notify_all()

    def start(self, on_loading: OnLoading = ignore_loading) -> None:
        """See Engine."""
        if self._failure is not None:
            raise self._failure
        self._stopped = ""

    def submit(self, requests: Sequence[GenerationRequest], sink: Sink) -> None:
        """See Engine."""
        jobs = [_Job(request, sink, fake_completion(request)) for request in requests]
        with self._changed:
            if self._stopped:
                raise GroupStoppedError(self._stopped)
            self._jobs += jobs
            ended = [job for job in jobs if job.whole.failure or not self._holding]
        self._finish(ended)

    def cancel(self, keys: Collection[RequestKey]) -> None:
        """See Engine."""
        wanted = set(keys)
        with self._changed:
            jobs = [job for job in self._jobs if job.request.key in wanted]
        self._finish(jobs, cancelled=True)

    def progress(self, keys: Collection[RequestKey]) -> Mapping[RequestKey, int]:
        """See Engine."""
        wanted = set(keys)
        with self._changed:
            return {j.request.key: j.done for j in self._jobs if j.request.key in wanted}

    def failure(self) -> EngineError | ModelError | None:
        """See Engine."""
        return self._failure

    def info(self) -> EngineInfo:
        """See Engine."""
        return EngineInfo(
            model=self._model,
            tp=1,
            device="none",
            dtype="none",
            max_model_len=CONTEXT,
            max_sequences=64,
            kv_blocks=1,
            block_size=16,
            generation=1,
            ready=not self._stopped,
        )

    def stop(self, grace_secs: float) -> None:
        """See Engine."""
        with self._changed:
            self._stopped = self._stopped or "The engine is stopping and takes no more requests."
            self._changed.wait_for(lambda: not self._jobs, grace_secs)
            self._jobs = []

    def _finish(self, jobs: Sequence[_Job], *, cancelled: bool = False) -> None:
        for job in jobs:
            with self._changed:
                if job not in self._jobs:
                    continue
                self._jobs.remove(job)
                self._changed.notify_all()
            job.sink(_cut(job) if cancelled else job.whole)


def fake_completion(request: GenerationRequest) -> Completion:
    """What a FakeEngine answers."""
    if isinstance(request.prompt, tuple):
        prompt = "".join(map(chr, request.prompt))
    elif request.prompt is not None:
        prompt = request.prompt
    else:
        prompt = str(request.messages[-1].get("content", "")) if request.messages else ""
    failure = _failure(prompt)
    if failure is not None:
        return Completion(request.key, finish_reason=FinishReason.ERROR, failure=failure)
    sampling = request.sampling
    text, reason = f"echo: {prompt}", FinishReason.STOP
    ids = [ord(character) for character in text]
    ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
    ends += [ids.index(token) + 1 for token in sampling.stop_token_ids if token in ids]
    end = min(ends, default=len(ids))
    limit = min(sampling.max_tokens or CONTEXT, CONTEXT - len(prompt))
    if end > limit:
        end, reason = limit, FinishReason.LENGTH
    shown = text[: end - (end > 0 and ids[end - 1] in sampling.stop_token_ids)]
    cuts = [shown.find(stop) for stop in sampling.stop if stop in shown]
    return Completion(
        key=request.key,
        text=shown[: min(cuts, default=len(shown))],
        token_ids=tuple(ids[:end]),
        prompt_tokens=len(prompt),
        finish_reason=reason,
        generation=1,
    )


def _failure(prompt: str) -> Failure | None:
    if prompt == "FAIL":
        return Failure("fake_failure", "The prompt asked for it.", "prompt")
    if not prompt:
        return Failure("empty_prompt", "The prompt has no tokens.", "prompt")
    if len(prompt) >= CONTEXT:
        return Failure("prompt_too_long", f"The prompt has {len(prompt)} tokens.", "prompt")
    return None


def _cut(job: _Job) -> Completion:
    ids = job.whole.token_ids[: job.done]
    return Completion(
        key=job.request.key,
        text="".join(map(chr, ids)),
        token_ids=ids,
        prompt_tokens=job.whole.prompt_tokens,
        finish_reason=FinishReason.CANCELLED,
        generation=1,
    )
