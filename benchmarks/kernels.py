"""Times of the kernels on the machine's GPU, beside the library's matmul and the byte floor.

    python benchmarks/kernels.py --out FOLDER        writes FOLDER/kernels.json

A call's time is that of a CUDA graph of many calls. The calls go round copies of their weights (or
caches) that together exceed the L2 cache several times, so each finds it cold. The byte floor is
every byte read or written once at the speed of a device-to-device copy, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from batchtp.kernels import int4_matmul, paged_attention
from batchtp.kernels.packed import PackedInt4, pack
from batchtp.kernels.weights import Int4Weight, ZeroKind

# N, K, group size, zeros: Llama-3-8B's and -70B's linears, and those of the demo model.
SHAPES = (
    (28672, 4096, 128, ZeroKind.INTEGER),
    (4096, 14336, 128, ZeroKind.INTEGER),
    (8192, 8192, 128, ZeroKind.INTEGER),
    (2560, 8192, 128, ZeroKind.INTEGER),
    (960, 576, 32, ZeroKind.MINIMUM),
    (3072, 576, 32, ZeroKind.MINIMUM),
    (576, 1536, 32, ZeroKind.MINIMUM),
)
ROWS = (1, 16, 64, 256, 2048)
# Sequences, tokens in the cache, q heads, kv heads, head_dim.
DECODES = (
    (1, 4096, 32, 8, 128),
    (32, 1024, 32, 8, 128),
    (32, 4096, 32, 8, 128),
    (256, 1024, 32, 8, 128),
    (32, 4096, 8, 1, 128),
    (32, 512, 9, 3, 64),
)
# Several times the 50 MB of an H200's L2.
_COLD_BYTES = 256 << 20
_MOST_COPIES = 1024
_GRAPH_CALLS = 64
_REPLAYS = 11


def seconds_a_call(calls: Sequence[Callable[[], Any]]) -> float:
    """The median over replays of a graph that makes every call in turn."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, _GRAPH_CALLS // len(calls))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def copy_bytes_a_second() -> float:
    """Bytes read and written in a second by an elementwise copy of 4 GiB.

    Not `copy_`: in a CUDA graph that is a memcpy node, which reached 65% of this on an H200.
    """
    source = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    nbytes = 2 * source.numel() * source.element_size()
    return nbytes / seconds_a_call([lambda: torch.mul(source, 2.0, out=target)])


def copies_for(nbytes: int) -> int:
    """Copies of so many bytes that together stay out of L2."""
    return max(2, min(_MOST_COPIES, -(-_COLD_BYTES // max(1, nbytes))))


def random_weight(n: int, k: int, group_size: int, zero_kind: ZeroKind) -> PackedInt4:
    """Packed random nibbles."""
    groups = -(-k // group_size)
    words = torch.randint(-(1 << 31), 1 << 31, (-(-k // 8), n), device="cuda", dtype=torch.int32)
    scales = torch.rand((groups, n), device="cuda").half() * 0.01
    zeros = torch.randint(0, 16, (groups, n), device="cuda", dtype=torch.uint8)
    minima = scales * -8
    integer = zero_kind is ZeroKind.INTEGER
    return pack(
        Int4Weight(words, scales, zeros if integer else minima, zero_kind, k, n, group_size)
    )


def copy_of(packed: PackedInt4) -> PackedInt4:
    """The same weight in other memory."""
    return replace(
        packed,
        words=packed.words.clone(),
        scales=packed.scales.clone(),
        zeros=packed.zeros.clone(),
    )


def time_matmuls(dtype: torch.dtype, bytes_a_second: float) -> list[dict[str, Any]]:
    """A row for every shape and number of rows."""
    table = []
    for n, k, group_size, zero_kind in SHAPES:
        packed = random_weight(n, k, group_size, zero_kind)
        ours = [packed, *(copy_of(packed) for _ in range(copies_for(packed.nbytes) - 1))]
        dense = [
            torch.randn((n, k), device="cuda", dtype=dtype) for _ in range(copies_for(2 * n * k))
        ]
        for m in ROWS:
            x = torch.randn((m, k), device="cuda", dtype=dtype)
            own = seconds_a_call([lambda w=w, x=x: int4_matmul.launch(x, w) for w in ours])
            library = seconds_a_call(
                [lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in dense]
            )
            nbytes = packed.nbytes + x.element_size() * m * (n + k)
            table.append(
                {
                    "n": n,
                    "k": k,
                    "m": m,
                    "group_size": group_size,
                    "zeros": zero_kind.value,
                    "splits": packed.splits,
                    "ours_us": own * 1e6,
                    "cublas_us": library * 1e6,
                    "speedup": library / own,
                    "share_of_byte_floor": nbytes / bytes_a_second / own,
                }
            )
            show(table[-1])
    return table


def time_decodes(dtype: torch.dtype, bytes_a_second: float) -> list[dict[str, Any]]:
    """A row for every decode step over a cache of one layer."""
    table = []
    block_size = 16
    for sequences, context, q_heads, kv_heads, dim in DECODES:
        blocks = -(-context // block_size)
        shape = (sequences * blocks, block_size, kv_heads, dim)
        nbytes = 2 * 2 * sequences * context * kv_heads * dim
        caches = [
            [torch.randn(shape, device="cuda", dtype=dtype) for _ in "kv"]
            for _ in range(copies_for(nbytes))
        ]
        tables = torch.randperm(shape[0], device="cuda").to(torch.int32).view(sequences, blocks)
        starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32)
        lengths = torch.full((sequences,), context, device="cuda", dtype=torch.int32)
        q = torch.randn((sequences, q_heads, dim), device="cuda", dtype=dtype)
        arguments = (tables, starts, lengths, dim**-0.5, q_heads // kv_heads, 0)
        own = seconds_a_call(
            [
                lambda k=k, v=v, q=q, arguments=arguments: paged_attention.launch(
                    q, k, v, *arguments
                )
                for k, v in caches
            ]
        )
        table.append(
            {
                "sequences": sequences,
                "context": context,
                "q_heads": q_heads,
                "kv_heads": kv_heads,
                "head_dim": dim,
                "ours_us": own * 1e6,
                "share_of_byte_floor": nbytes / bytes_a_second / own,
            }
        )
        show(table[-1])
    return table


def show(row: dict[str, Any]) -> None:
    """Print a row as it is measured."""
    parts = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
    print(" ".join(parts), flush=True)


def main() -> None:
    """Measure, and write kernels.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.json")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    bytes_a_second = copy_bytes_a_second()
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dtype": options.dtype,
        "copy_bytes_a_second": bytes_a_second,
        "int4_matmul": time_matmuls(dtype, bytes_a_second),
        "paged_attention_decode": time_decodes(dtype, bytes_a_second),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
