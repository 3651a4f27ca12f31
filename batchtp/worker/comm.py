"""The collectives of a TP group, and how its ranks find each other.

    device        ranks and devices               transport
    any           one rank                        none
    cpu           any                             gloo over loopback
    cuda          a device for every rank         NCCL
    cuda          ranks share a device            gloo, through host memory

Contributions of an all-reduce are summed in float32 in rank order, whatever the message's size, so
a token's sum depends neither on the tokens beside it nor on the ring that a library chose.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from batchtp.errors import GroupStartError

# Ranks reach the rendezvous as late as the slowest import of torch among them.
_LEAST_TIMEOUT_SECS = 60.0
# Below this a collective costs its latency and not its bytes.
_SMALL_BYTES = 256 * 1024
# Far past any start-up budget: the supervisor's deadline comes first.
_START_UP_TIMEOUT = timedelta(hours=2)


class Group(Protocol):
    """What the decoder asks of the other ranks. All make the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, the same bits on each. `x` may be overwritten."""

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """On rank 0 every rank's x [T, widths[rank]] side by side: [T, sum(widths)]; else None."""

    def wait_for_all(self, milestone: str) -> None:
        """Return once every rank is here. For start-up only: the supervisor keeps the deadline."""


class _Store(Protocol):
    """What is used of torch.distributed's key-value stores, which come without types."""

    def set(self, key: str, value: str) -> None: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class SoleGroup:
    """One rank: nothing to talk about."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """`x` itself."""
        return x

    def wait_for_all(self, milestone: str) -> None:
        """Nobody to wait for."""


class TorchGroup:
    """Ranks joined by torch.distributed. `via_host` stages device tensors in host memory."""

    def __init__(self, rank: int, size: int, store: _Store, *, via_host: bool) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._via_host = via_host

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x in rank order, in float32, rounded once to x's dtype."""
        if not x.numel():
            return x
        mine = (x.cpu() if self._via_host else x).reshape(-1)
        total = self._sum_small(mine) if mine.nbytes <= _SMALL_BYTES else self._sum_large(mine)
        return total.view(x.shape).to(x.device)

    def _sum_small(self, mine: Tensor) -> Tensor:
        """Everything to everyone: one round, which is what a short message costs."""
        parts = mine.new_empty((self.size, mine.numel()))
        dist.all_gather(list(parts.unbind()), mine)
        return _sum_in_order(parts)

    def _sum_large(self, mine: Tensor) -> Tensor:
        """Each rank sums its slice of the message, then the slices are gathered: fewer bytes."""
        share = -(-mine.numel() // self.size)
        padded = functional.pad(mine, (0, share * self.size - mine.numel()))
        parts = torch.empty_like(padded)
        dist.all_to_all_single(parts, padded)
        whole = torch.empty_like(padded)
        slices = list(whole.view(self.size, share).unbind())
        dist.all_gather(slices, _sum_in_order(parts.view(self.size, share)))
        return whole[: mine.numel()]

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """On rank 0 [T, sum(widths)]. Shares travel padded: gather wants them equal."""
        mine = x.cpu() if self._via_host else x
        padded = mine.new_zeros((mine.shape[0], max(widths)))
        padded[:, : mine.shape[1]] = mine
        if self.rank:
            dist.gather(padded, None, dst=0)
            return None
        parts = [torch.empty_like(padded) for _ in widths]
        dist.gather(padded, parts, dst=0)
        cut = [part[:, :width] for part, width in zip(parts, widths, strict=True)]
        return torch.cat(cut, dim=1).to(x.device)

    def wait_for_all(self, milestone: str) -> None:
        """Meet in the store, not in a collective: ranks may come minutes apart."""
        self._store.set(f"{milestone}/{self.rank}", "")
        self._store.wait([f"{milestone}/{rank}" for rank in range(self.size)], _START_UP_TIMEOUT)


def _sum_in_order(parts: Tensor) -> Tensor:
    """[ranks, N] to [N], in rank order, in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def rank_device(kind: str, rank: int) -> torch.device:
    """The device of a rank: its own card, or one shared round-robin when there are fewer cards.

    Raises GroupStartError when cuda is asked for and there is none.
    """
    if kind == "cpu":
        return torch.device("cpu")
    cards = torch.cuda.device_count()
    if not cards:
        raise GroupStartError(
            "Device cuda was asked for, but this machine shows no CUDA device. "
            "Use --device cpu, or check the driver with nvidia-smi."
        )
    return torch.device("cuda", rank % cards)


def ranks_on_device(kind: str, rank: int, size: int) -> int:
    """How many ranks of the group live on this rank's CUDA device (on a CPU: all)."""
    if kind == "cpu":
        return size
    cards = torch.cuda.device_count()
    return len(range(rank % cards, size, cards))


def join(
    rank: int, size: int, device: torch.device, rendezvous: str, *, timeout_secs: float
) -> Group:
    """Meet the other ranks at the FileStore path `rendezvous`; blocks until all are there.

    Raises torch.distributed's errors when the others do not come within the timeout.
    """
    if size == 1:
        return SoleGroup()
    own_card = device.type == "cuda" and size <= torch.cuda.device_count()
    # Loopback by name: gloo would otherwise resolve the hostname, which need not resolve at all.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Multicast over NVLink needs fabric rights that containers lack.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    store = dist.FileStore(rendezvous, size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if own_card else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=max(timeout_secs, _LEAST_TIMEOUT_SECS)),
        device_id=device if own_card else None,
    )
    return TorchGroup(rank, size, store, via_host=device.type == "cuda" and not own_card)
