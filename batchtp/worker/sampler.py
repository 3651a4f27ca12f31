"""Choosing the next token of each row, by counter and not by generator state.

    token = argmax over kept t of  logit[t] / temperature + gumbel(seed, position, t)

The noise is a hash of (seed, position, token id), so a draw depends on nothing else: not on the
batch it ran in, not on what was drawn before, not on a restart. Everything that crosses columns of
a row is a maximum, a sort or an integer sum, so a row's result is the same bits whatever rows are
beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this a division could overflow float32; the draw is the greedy one long before.
_LEAST_TEMPERATURE = 1e-6
# Few rows keep more tokens than this, and it spares them a sort of the whole vocabulary.
_CANDIDATES = 1024
# Weights of the top-p sum in fixed point. 2^32 a token leaves room for 2^31 tokens in int64.
_FIXED_POINT = float(2**32)
_MASK_64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw one row's token. Temperature 0 is greedy; top_k 0 and top_p 1 filter nothing.

    `position` is the index in its sequence of the token to be drawn.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    position: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """One token id for each row of logits [R, V] (float32), or None where it is not finite."""
    if not draws:
        return []
    finite = logits.isfinite().all(dim=1)
    tokens = logits.argmax(dim=1)
    noisy = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if noisy:
        rows = torch.tensor(noisy, device=logits.device)
        tokens[rows] = _draw(logits[rows], [draws[row] for row in noisy])
    ids: list[int] = tokens.tolist()
    good: list[bool] = finite.tolist()
    return [token if ok else None for token, ok in zip(ids, good, strict=True)]


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    temperatures = [max(draw.temperature, _LEAST_TEMPERATURE) for draw in draws]
    scale = torch.tensor(temperatures, device=logits.device, dtype=torch.float32)
    scores = (logits - logits.amax(dim=1, keepdim=True)) / scale[:, None]
    filtered = [
        row for row, draw in enumerate(draws) if draw.top_p < 1 or 0 < draw.top_k < logits.shape[1]
    ]
    if filtered:
        rows = torch.tensor(filtered, device=logits.device)
        scores[rows] = _filter(scores[rows], [draws[row] for row in filtered])
    return (scores + _gumbel(draws, logits.shape[1], logits.device)).argmax(dim=1)


def _filter(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """-inf for tokens outside the row's top-k, then outside the top-p of what top-k left.

    Of equal scores the lower token id counts as greater. The best token always stays.
    """
    vocab = scores.shape[1]
    top_k = torch.tensor([min(draw.top_k or vocab, vocab) for draw in draws], device=scores.device)
    top_p = torch.tensor([draw.top_p for draw in draws], device=scores.device, dtype=torch.float64)
    candidates = scores.topk(min(_CANDIDATES, vocab), dim=1).values
    totals = _weights(scores).sum(dim=1)
    kept = _count_kept(candidates, totals, top_k, top_p)
    least = candidates.gather(1, kept[:, None] - 1)
    # Told apart only by what lies past the candidates: a top-p that they do not reach, and a longer
    # top-k, whose own total is not that of the row.
    known = top_k <= candidates.shape[1]
    known |= (top_k == vocab) & (kept < candidates.shape[1])
    if not known.all():
        rows = (~known).nonzero()[:, 0]
        ranked = scores[rows].sort(dim=1, descending=True).values
        kept[rows] = _count_kept(ranked, totals[rows], top_k[rows], top_p[rows])
        least[rows] = ranked.gather(1, kept[rows, None] - 1)
    above, equal = scores > least, scores == least
    ties = kept - above.sum(dim=1)
    keep = above | (equal & (equal.cumsum(dim=1) <= ties[:, None]))
    return scores.masked_fill(~keep, -torch.inf)


def _count_kept(ranked: Tensor, totals: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """How many of a row's best tokens stay: [R]. `ranked` [R, n] are its n best scores, falling;
    `totals` the weights of all its tokens, for rows whose top-k reaches past those.
    """
    length = ranked.shape[1]
    weights = _weights(ranked)
    weights[torch.arange(length, device=ranked.device) >= top_k[:, None]] = 0
    running = weights.cumsum(dim=1)
    totals = torch.where(top_k <= length, running[:, -1], totals)
    keep = (weights > 0) & ((running - weights).double() < (top_p * totals.double())[:, None])
    return keep.sum(dim=1).clamp(min=1)


def _weights(scores: Tensor) -> Tensor:
    """exp(score) in fixed point. Integers: a sum is exact in any order, so it cannot depend on how
    a kernel split the row.
    """
    return (scores.exp() * _FIXED_POINT).to(torch.int64)


def _gumbel(draws: Sequence[Draw], vocab: int, device: torch.device) -> Tensor:
    """Gumbel noise [R, vocab] in float32: -log(E) of exponentials E = -log(1 - u).

    u has 31 bits and is finest near 0, where E is small: those are the tokens that can win.
    """
    bits = _hash([_keys(draw.seed, draw.position) for draw in draws], vocab, device)
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _hash(keys: Sequence[tuple[int, int]], vocab: int, device: torch.device) -> Tensor:
    """32 well-mixed bits for each (row, token id): int32 [R, vocab].

    A multiply-xorshift mixer over the token id, keyed at its start and in its middle. int32
    multiplication wraps, and a shift right is made logical by masking the copied sign bits away.
    """
    first, second = (
        torch.tensor(part, device=device)[:, None].int() for part in zip(*keys, strict=True)
    )
    x = torch.arange(vocab, device=device, dtype=torch.int32) * _signed(0x9E3779B1) + first
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= second
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def _keys(seed: int, position: int) -> tuple[int, int]:
    mixed = _splitmix64(_splitmix64(seed & _MASK_64) ^ position)
    return _signed(mixed & 0xFFFFFFFF), _signed(mixed >> 32)


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    """The int32 with these 32 bits."""
    return word - 2**32 if word >= 2**31 else word
