"""The vocabulary: frozen records that every part of batchtp speaks. Standard library only.

Records are changed with `dataclasses.replace`, never by assignment.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

DEMO_MODEL = "SmolLM2-135M-Instruct"


class BatchState(enum.StrEnum):
    """Where a batch is in its life (OpenAI's names)."""

    VALIDATING = "validating"  # messages are arriving; not yet sealed and complete
    FAILED = "failed"  # the submission itself was wrong (digest or count); nothing ran
    IN_PROGRESS = "in_progress"  # accepted: every request is in Postgres
    COMPLETED = "completed"  # every request has its row
    EXPIRED = "expired"  # the deadline passed; what finished is kept
    CANCELLING = "cancelling"  # cancel asked for; running requests are being stopped
    CANCELLED = "cancelled"  # nothing runs any more; what finished is kept

    @property
    def final(self) -> bool:
        """Whether no row of the batch changes any more."""
        return self in {
            BatchState.FAILED,
            BatchState.COMPLETED,
            BatchState.EXPIRED,
            BatchState.CANCELLED,
        }


class ChunkState(enum.StrEnum):
    """Where a chunk (a run of requests) is in its life."""

    PENDING = "pending"  # its batch is not accepted yet
    READY = "ready"  # may be claimed
    LEASED = "leased"  # a worker holds its lease
    DONE = "done"  # every row of it is written


class Endpoint(enum.StrEnum):
    """The two OpenAI batch urls batchtp answers."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end of sequence, or a stop string/id
    LENGTH = "length"  # max_tokens, or the context was full
    ERROR = "error"  # see the completion's error
    CANCELLED = "cancelled"  # its batch was cancelled; partial tokens kept


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Temperature 0 is greedy.

    `top_k` 0 and `top_p` 1 switch the filter off. `max_tokens` None means: up to the context.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Names one request everywhere: its batch and its zero-based line index there."""

    batch_id: str
    index: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One checked request, as the engine takes it. Exactly one of prompt and messages is set.

    `prompt` is text or token ids. `messages` are chat messages (role, content, …) for the template.
    """

    key: RequestKey
    custom_id: str
    endpoint: Endpoint
    sampling: SamplingParams
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    echo_model: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one request failed. `line` is the one-based line of the submitted file, 0 if unknown."""

    code: str
    message: str
    param: str | None = None
    line: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one request. On failure `failure` is set and partial tokens are kept.

    `generation` is the incarnation of the TP group that produced the last token.
    """

    key: RequestKey
    text: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    finish_reason: FinishReason = FinishReason.STOP
    failure: Failure | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """How many requests of a batch there are, and how many ended how."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens read and written. While a batch runs, `completion_tokens` counts running rows too."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """A batch as it stands now."""

    id: str
    model: str
    state: BatchState
    counts: RequestCounts
    usage: TokenUsage
    created_at: datetime
    accepted_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error: Failure | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a running TP group is: for status, doctor and logs. `ready` means a recent good step."""

    model: str
    tp: int
    device: str
    dtype: str
    max_model_len: int
    max_sequences: int
    kv_blocks: int
    block_size: int
    generation: int
    ready: bool
    restarts: int = 0
    rank_pids: tuple[int, ...] = ()
