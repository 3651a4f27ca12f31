"""An engine without a model: deterministic text at once, or when the test lets it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

from batchtp.core import (
    Completion,
    EngineInfo,
    Failure,
    FinishReason,
    GenerationRequest,
    RequestKey,
)
from batchtp.errors import EngineError, GroupStoppedError, ModelError
from batchtp.worker.engine import Sink

_DEFAULT_TOKENS = 16


class FakeEngine:
    """Answers `echo: <prompt>` with token ids that spell it, up to max_tokens characters.

    `hold()` makes requests wait until `release()`: a test's stand-in for slow generation.
    `fail(error)` ends it as a real engine ends when its group cannot be replaced. A prompt of
    `FAIL` ends as a row with code `fake_failure`.
    """

    def __init__(self, model: str = "fake") -> None:
        self._model = model
        self._lock = threading.Lock()
        self._held: dict[RequestKey, tuple[GenerationRequest, Sink]] = {}
        self._holding = False
        self._running = False
        self._failure: EngineError | ModelError | None = None

    def hold(self) -> None:
        """Answer nothing until `release`."""
        self._holding = True

    def release(self) -> None:
        """Answer what is held, and go on answering at once."""
        self._holding = False
        with self._lock:
            held, self._held = list(self._held.values()), {}
        for request, sink in held:
            sink(fake_completion(request))

    def fail(self, error: EngineError | ModelError) -> None:
        """Give up for good."""
        self._failure = error

    def start(self) -> None:
        """See Engine."""
        if self._failure is not None:
            raise self._failure
        self._running = True

    def submit(self, requests: Sequence[GenerationRequest], sink: Sink) -> None:
        """See Engine."""
        if not self._running or self._failure is not None:
            raise GroupStoppedError("The engine is stopping and takes no more requests.")
        for request in requests:
            if self._holding:
                with self._lock:
                    self._held[request.key] = (request, sink)
            else:
                sink(fake_completion(request))

    def cancel(self, keys: Collection[RequestKey]) -> None:
        """See Engine."""
        with self._lock:
            cancelled = [(k, self._held.pop(k)) for k in list(keys) if k in self._held]
        for key, (_, sink) in cancelled:
            sink(Completion(key, finish_reason=FinishReason.CANCELLED))

    def progress(self, keys: Collection[RequestKey]) -> Mapping[RequestKey, int]:
        """See Engine."""
        with self._lock:
            return {key: 1 for key in keys if key in self._held}

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
            max_model_len=4096,
            max_sequences=64,
            kv_blocks=1,
            block_size=16,
            generation=1,
            ready=self._running and self._failure is None,
        )

    def stop(self, grace_secs: float) -> None:
        """See Engine."""
        self._running = False


def fake_completion(request: GenerationRequest) -> Completion:
    """What a FakeEngine answers."""
    if request.prompt == "FAIL":
        failure = Failure("fake_failure", "The prompt asked for it.", "prompt")
        return Completion(request.key, finish_reason=FinishReason.ERROR, failure=failure)
    if request.messages is not None:
        prompt = str(request.messages[-1]["content"])
    else:
        prompt = request.prompt if isinstance(request.prompt, str) else repr(request.prompt)
    limit = request.sampling.max_tokens or _DEFAULT_TOKENS
    whole = f"echo: {prompt}"
    text = whole[:limit]
    return Completion(
        key=request.key,
        text=text,
        token_ids=tuple(ord(c) for c in text),
        prompt_tokens=len(prompt),
        finish_reason=FinishReason.LENGTH if len(whole) > limit else FinishReason.STOP,
        generation=1,
    )
