"""One process of test_comm.py: joins a gloo group and checks what its collectives give."""

from __future__ import annotations

import os
import sys

import torch

from batchtp.worker.comm import join


def contribution(rank: int, rows: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(rank)
    return torch.randn(1000, 300, generator=noise)[:rows] * 10**rank


def in_order(size: int, rows: int) -> torch.Tensor:
    total = contribution(0, rows)
    for rank in range(1, size):
        total = total + contribution(rank, rows)
    return total


def main() -> None:
    rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    group = join(rank, size, torch.device("cpu"), meeting, timeout_secs=60)
    group.wait_for_all("here")
    # From one row to far more than a short message, and none at all.
    for rows in (0, 1, 7, 999, 1000):
        assert torch.equal(group.all_reduce(contribution(rank, rows)), in_order(size, rows))
    halves = group.all_reduce(contribution(rank, 5).to(torch.bfloat16))
    assert halves.dtype == torch.bfloat16
    widths = [8 * (size - 1 - peer) for peer in range(size)]
    joined = group.gather_columns(torch.full((3, widths[rank]), float(rank)), widths)
    if rank:
        assert joined is None
    else:
        assert joined is not None
        wanted = [float(peer) for peer, width in enumerate(widths) for _ in range(width)]
        assert joined.tolist() == [wanted] * 3
    print("done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
