"""What each rank holds of each tensor: rows, groups and bytes, before a weight is read. No torch.

Bytes are those of the tensors a rank keeps: in the int4 kernel's layout (see kernels.packed), or in
the plain one that CPUs start from (see kernels.weights). What a config calls act-order is taken to
be so, since the index itself is not read; q, k and v, and gate and up, share theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from batchtp.model import names
from batchtp.model.config_records import ModelConfig
from batchtp.model.sharding import ShardPlan
from batchtp.model.stored import StoredLinear, StoredModel

KERNEL, PLAIN = "kernel", "plain"
# See kernels.packed and kernels.weights, which may not be imported here: they import torch.
_TILE_ROWS = 128
_TILE_WORDS = 16
_ROWS_PER_WORD = 8
_INT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class TensorShare:
    """What a rank holds of a tensor of every one of `layers` layers (1 for the model's own).

    `inputs` and `outputs`: the run of the whole tensor's; a vector has outputs alone. `groups`: of
    the whole tensor's, those of which the rank has scales. `first_group_offset`: rows of the first
    of them that belong to ranks before. `nbytes`: of one layer.
    """

    tensor: str
    form: str
    layers: int
    inputs: range
    outputs: range
    groups: range
    first_group_offset: int
    nbytes: int


def shard_table(
    model: StoredModel, plan: ShardPlan, *, dtype_bytes: int, layout: str = KERNEL
) -> tuple[TensorShare, ...]:
    """Every tensor that a rank holds, layers that hold the same alike put together.

    `dtype_bytes`: of a number in the dtype that is computed in.
    """
    return _together(_Table(model, plan, dtype_bytes, layout).shares())


def _together(shares: Iterator[TensorShare]) -> tuple[TensorShare, ...]:
    counts: dict[TensorShare, int] = {}
    for share in shares:
        counts[share] = counts.get(share, 0) + 1
    return tuple(replace(share, layers=count) for share, count in counts.items())


class _Table:
    def __init__(self, model: StoredModel, plan: ShardPlan, dtype_bytes: int, layout: str) -> None:
        self._model = model
        self._config: ModelConfig = model.config
        self._plan = plan
        self._dtype_bytes = dtype_bytes
        self._int4_bytes = _kernel_bytes if layout == KERNEL else _plain_bytes

    def shares(self) -> Iterator[TensorShare]:
        config, plan = self._config, self._plan
        hidden = range(config.hidden_size)
        yield self._dense(names.EMBEDDING, hidden, plan.vocab)
        yield self._vector(names.FINAL_NORM, hidden)
        if not config.tie_word_embeddings and plan.vocab:
            yield self._linear(names.LM_HEAD, hidden, plan.vocab)
        for layer in range(config.num_layers):
            yield from self._layer(layer)

    def _layer(self, layer: int) -> Iterator[TensorShare]:
        config, plan = self._config, self._plan
        hidden, size = range(config.hidden_size), config.head_dim
        q, kv = (range(r.start * size, r.stop * size) for r in (plan.q_heads, plan.kv_heads))

        def module(part: str) -> str:
            return names.layer_module(layer, part)

        for part in (names.INPUT_NORM, names.POST_NORM):
            yield self._vector(module(part), hidden)
        if config.qk_norm:
            for part in (names.Q_NORM, names.K_NORM):
                yield self._vector(module(part), range(size))
        for part, run, bias in (
            (names.Q, q, config.attention_bias),
            (names.K, kv, config.attention_bias),
            (names.V, kv, config.attention_bias),
            (names.GATE, plan.intermediate, config.mlp_bias),
            (names.UP, plan.intermediate, config.mlp_bias),
        ):
            if run:
                shares_index = part in (names.K, names.V, names.UP)
                yield self._linear(module(part), hidden, run, has_index=not shares_index)
                if bias:
                    yield self._vector(module(part), run, "bias")
        for part, run, bias in (
            (names.O, q, config.attention_output_bias),
            (names.DOWN, plan.intermediate, config.mlp_bias),
        ):
            if run:
                yield self._linear(module(part), run, hidden)
                # The sum over ranks has it once.
                if bias and plan.rank == 0:
                    yield self._vector(module(part), hidden, "bias")

    def _linear(
        self, module: str, inputs: range, outputs: range, *, has_index: bool = True
    ) -> TensorShare:
        stored = self._model.linear(module)
        if stored is None:
            return self._dense(module, inputs, outputs)
        size = stored.group_size or stored.inputs
        every = range(-(-stored.inputs // size))
        groups = range(inputs.start // size, -(-inputs.stop // size))
        act_order = stored.act_order and len(every) > 1
        return TensorShare(
            tensor=_shown(module),
            form=stored.form,
            layers=1,
            inputs=inputs,
            outputs=outputs,
            groups=every if act_order else groups,
            first_group_offset=0 if act_order else inputs.start % size,
            nbytes=self._int4_bytes(
                stored,
                len(inputs),
                len(outputs),
                len(every if act_order else groups),
                act_order and has_index,
            ),
        )

    def _dense(self, module: str, inputs: range, outputs: range) -> TensorShare:
        return TensorShare(
            tensor=_shown(module),
            form="dense",
            layers=1,
            inputs=inputs,
            outputs=outputs,
            groups=range(0),
            first_group_offset=0,
            nbytes=len(inputs) * len(outputs) * self._dtype_bytes,
        )

    def _vector(self, module: str, run: range, part: str = "weight") -> TensorShare:
        share = self._dense(module, range(1), run)
        suffix = "" if part == "weight" else f".{part}"
        return replace(share, tensor=share.tensor + suffix, inputs=range(0))


def _plain_bytes(stored: StoredLinear, k: int, n: int, groups: int, index: bool) -> int:
    words = -(-k // _ROWS_PER_WORD) * n * _INT32_BYTES
    scales = groups * n * (stored.scale_bytes + stored.zero_bytes)
    return words + scales + (k * _INT32_BYTES if index else 0)


def _kernel_bytes(stored: StoredLinear, k: int, n: int, groups: int, index: bool) -> int:
    tiles = -(-k // _TILE_ROWS)
    words = tiles * n * _TILE_WORDS * _INT32_BYTES
    scales = groups * n * (stored.scale_bytes + stored.zero_bytes)
    return words + scales + (tiles * _TILE_ROWS * _INT32_BYTES if index else 0)


def _shown(module: str) -> str:
    part = names.layer_part(module)
    return f"layers.*.{part}" if part != module else module


def total_bytes(table: tuple[TensorShare, ...]) -> int:
    """Bytes of all that a rank holds."""
    return sum(share.layers * share.nbytes for share in table)
