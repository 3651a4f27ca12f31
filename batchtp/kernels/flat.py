"""A linear's weight as named tensors and plain values, and back, for who stores or shares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from torch import Tensor

from batchtp.errors import CheckpointError
from batchtp.kernels.packed import PackedInt4
from batchtp.kernels.weights import Int4Weight, ZeroKind

Stored: TypeAlias = Tensor | Int4Weight | PackedInt4
_KINDS: dict[str, type[Int4Weight] | type[PackedInt4]] = {
    "int4": Int4Weight,
    "packed": PackedInt4,
}
_DENSE = "dense"


@dataclass(frozen=True, slots=True)
class Flat:
    """A weight taken apart. `values` is what JSON can hold."""

    kind: str
    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def flatten(weight: Stored) -> Flat:
    """Take a weight apart; its tensors are not copied."""
    if isinstance(weight, Tensor):
        return Flat(_DENSE, {}, {"weight": weight})
    kind = next(name for name, of in _KINDS.items() if isinstance(weight, of))
    parts = {field.name: getattr(weight, field.name) for field in fields(weight)}
    tensors = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    return Flat(kind, {n: p for n, p in parts.items() if n not in tensors}, tensors)


def rebuild(flat: Flat) -> Stored:
    """The weight again. Raises CheckpointError when the parts are not a weight's."""
    if flat.kind == _DENSE:
        return flat.tensors["weight"]
    values: dict[str, Any] = {**flat.values, **flat.tensors}
    try:
        values["zero_kind"] = ZeroKind(values["zero_kind"])
        return _KINDS[flat.kind](**values)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"A stored weight is not readable: {error!r}.") from error
