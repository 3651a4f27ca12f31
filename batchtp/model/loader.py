"""Loads one rank's share of a checkpoint: which runs of which tensors, and what they are fused to.

Column-parallel linears (q, k, v, gate, up, the head) give the rank some of their outputs,
row-parallel ones (o, down) some of their inputs. No more than the share is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from batchtp.errors import UnsupportedModelError
from batchtp.kernels import ops
from batchtp.kernels.flat import Stored
from batchtp.kernels.weights import Int4Weight
from batchtp.model import names
from batchtp.model.config_records import ModelConfig
from batchtp.model.quantization import GGUF
from batchtp.model.readers.gguf import GgufSource
from batchtp.model.readers.hf import HfSource
from batchtp.model.readers.packed import LinearRun
from batchtp.model.readers.rounded import RoundedSource
from batchtp.model.readers.source import Weight, WeightSource
from batchtp.model.sharding import ShardPlan

LinearParts: TypeAlias = tuple[Stored, ...]
ShardTensors: TypeAlias = dict[str, Stored | LinearParts]
#: Told the share of the load that is done, 0 to 1, again and again.
Progress: TypeAlias = Callable[[float], None]

# What `quantize` may ask for.
QUANTIZE_INT4 = "int4"


def load_shard(
    path: Path,
    config: ModelConfig,
    plan: ShardPlan,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantize: str = "none",
    progress: Progress = lambda done: None,
) -> ShardTensors:
    """The rank's tensors, by the decoder's names:

        embed [vocab, hidden], norm, lm_head (absent when tied)
        layers.{i}.input_norm, .post_norm, .q_norm, .k_norm
        layers.{i}.qkv, .o, .gate_up, .down, each with _bias where the model has it

    A dense linear is [n, k] in `dtype`; a quantised one keeps its checkpoint's scales, and is in
    the kernel's layout where one will run it. `quantize` "int4" rounds the dense linears of an
    unquantised checkpoint. Linears that run side by side are one weight along n, or a tuple of
    parts where their formats differ. A linear of which the rank owns nothing is absent. The bias
    of a row-parallel linear is on rank 0.

    Raises CheckpointError for a tensor or file that is missing, malformed or of another shape,
    UnsupportedModelError for one that the decoder cannot use.
    """
    with closing(open_source(path, config, dtype, device, quantize=quantize)) as source:
        return _Loader(source, config, plan, progress).load()


def open_source(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantize: str = "none",
) -> WeightSource:
    """The checkpoint, opened for reading runs of it.

    Raises CheckpointError, UnsupportedModelError when what is quantised shall be quantised.
    """
    source = (GgufSource if path.is_file() else HfSource)(path, config, dtype, device)
    if quantize != QUANTIZE_INT4:
        return source
    if config.quantization is not None and config.quantization.method != GGUF:
        source.close()
        raise UnsupportedModelError(
            f"{path} is quantised already ({config.quantization.method}); quantize=int4 rounds "
            "float16, bfloat16 and float32 checkpoints. Leave the setting out."
        )
    return RoundedSource(source)


@dataclass(frozen=True, slots=True)
class _Part:
    """One linear's name, its outputs, and those that the rank owns."""

    module: str
    n: int
    columns: range


class _Loader:
    def __init__(
        self, source: WeightSource, config: ModelConfig, plan: ShardPlan, progress: Progress
    ) -> None:
        self._source = source
        self._progress = progress
        self._config = config
        self._plan = plan
        self._tensors: ShardTensors = {}

    def load(self) -> ShardTensors:
        config, vocab = self._config, self._plan.vocab
        self._tensors["embed"] = self._source.rows(
            f"{names.EMBEDDING}.weight", (config.vocab_size, config.hidden_size), vocab
        )
        self._norm("norm", names.FINAL_NORM, config.hidden_size)
        if not config.tie_word_embeddings:
            self._columns("lm_head", [_Part(names.LM_HEAD, config.vocab_size, vocab)], bias=False)
        for layer in range(config.num_layers):
            self._progress(layer / config.num_layers)
            self._layer(layer)
        self._progress(1.0)
        return self._tensors

    def _layer(self, layer: int) -> None:
        config, plan = self._config, self._plan

        def module(part: str) -> str:
            return names.layer_module(layer, part)

        to = f"layers.{layer}"
        self._norm(f"{to}.input_norm", module(names.INPUT_NORM), config.hidden_size)
        self._norm(f"{to}.post_norm", module(names.POST_NORM), config.hidden_size)
        if config.qk_norm:
            self._norm(f"{to}.q_norm", module(names.Q_NORM), config.head_dim)
            self._norm(f"{to}.k_norm", module(names.K_NORM), config.head_dim)
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        q, kv = self._features(plan.q_heads), self._features(plan.kv_heads)
        qkv = [
            _Part(module(names.Q), q_size, q),
            _Part(module(names.K), kv_size, kv),
            _Part(module(names.V), kv_size, kv),
        ]
        self._columns(f"{to}.qkv", qkv, bias=config.attention_bias)
        self._rows(f"{to}.o", module(names.O), q_size, q, bias=config.attention_output_bias)
        size, run = config.intermediate_size, plan.intermediate
        gate_up = [_Part(module(part), size, run) for part in (names.GATE, names.UP)]
        self._columns(f"{to}.gate_up", gate_up, bias=config.mlp_bias)
        self._rows(f"{to}.down", module(names.DOWN), size, run, bias=config.mlp_bias)

    def _features(self, heads: range) -> range:
        return range(heads.start * self._config.head_dim, heads.stop * self._config.head_dim)

    def _norm(self, to: str, module: str, size: int) -> None:
        self._tensors[to] = self._source.vector(f"{module}.weight", size, range(size))

    def _columns(self, to: str, parts: Sequence[_Part], *, bias: bool) -> None:
        hidden = self._config.hidden_size
        if not parts[0].columns:
            return
        self._put(
            to,
            [
                self._source.linear(
                    LinearRun(part.module, hidden, part.n, range(hidden), part.columns)
                )
                for part in parts
            ],
        )
        biases = [self._bias(part, wanted=bias) for part in parts]
        found = [one for one in biases if one is not None]
        if found:
            self._tensors[f"{to}_bias"] = torch.cat(found)

    def _rows(self, to: str, module: str, k: int, run: range, *, bias: bool) -> None:
        hidden = self._config.hidden_size
        if not run:
            return
        every = range(hidden)
        self._put(to, [self._source.linear(LinearRun(module, k, hidden, run, every))])
        found = self._bias(_Part(module, hidden, every), wanted=bias)
        # Rank 0 always owns a share, and the sum over ranks must have the bias once.
        if found is not None and self._plan.rank == 0:
            self._tensors[f"{to}_bias"] = found

    def _put(self, to: str, parts: Sequence[Weight]) -> None:
        # One linear after another in its final layout: the peak is the shard and one linear.
        fused = [ops.pack_for_device(part) for part in fuse(parts)]
        self._tensors[to] = fused[0] if len(fused) == 1 else tuple(fused)

    def _bias(self, part: _Part, *, wanted: bool) -> Tensor | None:
        name = f"{part.module}.bias"
        if not wanted and not self._source.has(name):
            return None
        bias = self._source.vector(name, part.n, part.columns)
        if wanted:
            return bias
        if bias.any():
            raise UnsupportedModelError(
                f"Tensor {name} is not zero, and a {self._config.architecture} has no such bias."
            )
        # Some tools add a bias of zeros to every linear.
        return None


def fuse(parts: Sequence[Weight]) -> Sequence[Weight]:
    """Linears of the same inputs as one weight along n; as they are where their formats differ."""
    dense = [part for part in parts if isinstance(part, Tensor)]
    if len(parts) == 1:
        return parts
    if len(dense) == len(parts):
        return [torch.cat(dense)]
    packed = [part for part in parts if isinstance(part, Int4Weight)]
    if len(packed) < len(parts) or not all(_alike(packed[0], part) for part in packed[1:]):
        return parts
    return [
        replace(
            packed[0],
            qweight=torch.cat([part.qweight for part in packed], dim=1),
            scales=torch.cat([part.scales for part in packed], dim=1),
            zeros=torch.cat([part.zeros for part in packed], dim=1),
            n=sum(part.n for part in packed),
        )
    ]


def _alike(a: Int4Weight, b: Int4Weight) -> bool:
    """Whether the two differ in nothing but their outputs."""
    fields = ("zero_kind", "k", "group_size", "first_group_offset")
    return (
        all(getattr(a, name) == getattr(b, name) for name in fields)
        and a.scales.dtype == b.scales.dtype
        and a.scales.shape[0] == b.scales.shape[0]
        and _same_index(a.group_index, b.group_index)
    )


def _same_index(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
