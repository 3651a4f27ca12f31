"""What the supervisor and its ranks say to each other. Standard library only.

One connected Unix stream socket per rank, inherited as a file descriptor. A frame is a 4-byte
little-endian length and a pickle of one of these records. Both ends are this program, on one host,
over a socket nobody else can open, so pickle is safe here and nowhere else.

    supervisor -> rank   Hello, StartCache, Plan, Shutdown
    rank -> supervisor   Loading, Ready, StepResult (rank 0 with tokens, others without), RankFault

A step: the supervisor sends the same Plan to every rank; every rank answers with a StepResult that
names the generation and the step. Anything of an older generation is dropped.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """How one incarnation of the TP group is to be built; the same for every rank but `rank`."""

    model_path: str
    tp: int
    device: str  # "cpu" or "cuda"
    dtype: str  # "float32", "float16", "bfloat16" (resolved: never "auto")
    max_model_len: int  # 0: what the checkpoint's config says
    max_sequences: int
    max_batched_tokens: int
    block_size: int
    kv_blocks: int  # 0: from free memory
    memory_fraction: float
    step_timeout_secs: float  # the backend's own timeout: only the backstop
    quantize: str = "none"  # "int4": round an unquantised checkpoint's linears at load
    weight_cache: str = ""  # directory of shards as the device computes with them; empty: none
    weight_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame to a rank: who it is, and where the group meets (one FileStore a generation)."""

    config: GroupConfig
    rank: int
    generation: int
    rendezvous: str


@dataclass(frozen=True, slots=True)
class Loading:
    """The rank reads its share: `done` of it, 0 to 1. Any number of them come before Ready."""

    rank: int
    generation: int
    done: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank has joined, loaded and sized its cache. The least `kv_blocks` of all is taken."""

    rank: int
    generation: int
    kv_blocks: int  # as many as this rank can hold (>= 1)
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    load_secs: float
    host_peak_bytes: int = 0  # what its host memory rose by while it loaded, at most
    device_peak_bytes: int = 0  # most of the device's memory that it held while it loaded


@dataclass(frozen=True, slots=True)
class StartCache:
    """Answer to the last Ready: allocate the KV cache with this many blocks on every rank."""

    kv_blocks: int


# A tuple and not a dataclass: hundreds a step, and it pickles five times as fast.
class Slice(NamedTuple):
    """One sequence's part of a step: compute `token_ids` at positions start.. and, if `sample`,
    draw the next token after the last of them.

    `blocks` is the sequence's block table, long enough for start + len(token_ids) tokens: token i
    is in row blocks[i // block_size] * block_size + i % block_size of the cache.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    sample: bool
    temperature: float
    top_p: float
    top_k: int
    seed: int  # resolved: never None; the draw depends on (seed, position) alone


@dataclass(frozen=True, slots=True)
class Plan:
    """One step of the group."""

    generation: int
    step: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A rank finished a step. Rank 0 carries (sequence_id, token) for each sampling slice.

    `bad` lists sequences whose logits were not finite: their request fails, the others go on.
    """

    rank: int
    generation: int
    step: int
    tokens: tuple[tuple[int, int], ...]
    bad: tuple[int, ...]
    compute_secs: float


@dataclass(frozen=True, slots=True)
class RankFault:
    """A rank raised; its last word before it exits. `kind` is the exception's class name.

    `permanent` marks errors that a restart cannot mend (bad checkpoint, unsupported config).
    """

    rank: int
    generation: int
    phase: str
    kind: str
    message: str
    traceback: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the rank process at once, with no group teardown."""


ToRank: TypeAlias = Hello | StartCache | Plan | Shutdown
FromRank: TypeAlias = Loading | Ready | StepResult | RankFault


def encode(message: ToRank | FromRank) -> bytes:
    """The message's frame, for whoever sends the same one to many."""
    payload = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(payload)) + payload


def send(sock: socket.socket, message: ToRank | FromRank) -> None:
    """Write one frame. Raises OSError when the peer is gone, TimeoutError after sock.timeout."""
    sock.sendall(encode(message))


def receive(sock: socket.socket) -> ToRank | FromRank:
    """Read one frame. Raises EOFError when the peer closed, TimeoutError after sock.timeout."""
    (length,) = _LENGTH.unpack(_read_exactly(sock, _LENGTH.size))
    message: ToRank | FromRank = pickle.loads(_read_exactly(sock, length))
    return message


class FrameBuffer:
    """Puts a stream's pieces together into messages, for a reader that must never block."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[FromRank]:
        """Add what was read; the messages that are whole now."""
        self._data += data
        messages: list[FromRank] = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            messages.append(pickle.loads(bytes(self._data[_LENGTH.size : end])))
            del self._data[:end]
        return messages


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise EOFError("the other end of the rank socket is closed")
        parts += part
    return bytes(parts)
