"""A checkpoint of dense weights, its linears rounded to int4 as they are read.

Whole groups are read and rounded, and the run cut out of them, so that a group which straddles two
ranks has the same scale on both: the model does not depend on the TP degree. The head stays dense,
as in most int4 checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from batchtp.errors import CheckpointError
from batchtp.kernels.round_to_int4 import GROUP_ROWS, round_to_int4
from batchtp.kernels.weights import Int4Weight
from batchtp.model.names import LM_HEAD
from batchtp.model.readers.packed import LinearRun, rows_from
from batchtp.model.readers.source import Weight, WeightSource


class RoundedSource:
    """See WeightSource."""

    def __init__(self, dense: WeightSource) -> None:
        self._dense = dense

    def has(self, tensor: str) -> bool:
        """See WeightSource."""
        return self._dense.has(tensor)

    def vector(self, tensor: str, size: int, run: range) -> Tensor:
        """See WeightSource."""
        return self._dense.vector(tensor, size, run)

    def rows(self, tensor: str, shape: tuple[int, int], run: range) -> Tensor:
        """See WeightSource."""
        return self._dense.rows(tensor, shape, run)

    def linear(self, run: LinearRun) -> Weight:
        """See WeightSource. Raises CheckpointError for a weight that is not finite, too."""
        if run.module == LM_HEAD:
            return self._dense.linear(run)
        start = run.rows.start // GROUP_ROWS * GROUP_ROWS
        stop = min(-(-run.rows.stop // GROUP_ROWS) * GROUP_ROWS, run.k)
        whole = self._dense.linear(replace(run, rows=range(start, stop)))
        if isinstance(whole, Int4Weight):
            raise CheckpointError(f"{run.module} is quantised already; load it as it is.")
        if not whole.isfinite().all():
            raise CheckpointError(f"{run.module}.weight holds a NaN or an infinity.")
        return _cut(round_to_int4(whole), range(run.rows.start - start, run.rows.stop - start))

    @property
    def bytes_read(self) -> int:
        """See WeightSource."""
        return self._dense.bytes_read

    def close(self) -> None:
        """See WeightSource."""
        self._dense.close()


def _cut(weight: Int4Weight, rows: range) -> Int4Weight:
    """Some rows of a weight whose groups cover them."""
    if rows == range(weight.k):
        return weight
    words = weight.qweight[rows.start // 8 : -(-rows.stop // 8)]
    skip = rows.start % 8
    return replace(
        weight,
        qweight=rows_from(words, 4, range(skip, skip + len(rows))).contiguous(),
        k=len(rows),
        first_group_offset=rows.start,
    )
