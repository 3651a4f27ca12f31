"""Rotary position tables: one row of cosines and sines for every position.

The formulas are transformers' own (float32 frequencies, float32 angles), so that a model hears the
positions it was trained with to the last bit that matters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchtp.model.config import ModelConfig, RopeConfig


def rope_table(config: ModelConfig, positions: int, device: torch.device) -> Tensor:
    """cos | sin of every position below `positions`: float32 [positions, head_dim]."""
    rope, dim = config.rope, config.head_dim
    steps = torch.arange(positions, dtype=torch.float32)
    if rope.kind == "dynamic":
        angles = steps[:, None] * _dynamic(config, positions)
    else:
        angles = steps[:, None] * _inverse_frequencies(rope, dim)[None, :]
    scale = _attention_factor(rope)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1).to(device)


def _inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """[dim / 2]."""
    plain = _powers(rope.theta, dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, dim)
    return plain


def _powers(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, those between blended."""
    lengths = 2 * math.pi / plain
    original = rope.original_max_position_embeddings
    blend = (original / lengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * plain / rope.factor + blend * plain
    slow = torch.where(lengths > original / rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(lengths < original / rope.high_freq_factor, plain, slow)


def _yarn(rope: RopeConfig, dim: int) -> Tensor:
    """Interpolated frequencies for slow dimensions, plain ones for fast, a ramp between them."""

    def turning(rotations: float) -> float:
        length = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = turning(rope.beta_fast), turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A ramp of no width would divide by zero.
    width = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    plain = _powers(rope.theta, dim)
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (rope.factor * powers) * ramp + plain * (1 - ramp)


def _attention_factor(rope: RopeConfig) -> float:
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _dynamic(config: ModelConfig, positions: int) -> Tensor:
    """[positions, dim / 2]: past the trained length, the base grows with the position.

    Each position takes the base of the sequence that ends with it: what a cached decode does token
    by token, and the one reading that does not depend on how a prompt was cut into steps.
    """
    rope, dim, trained = config.rope, config.head_dim, config.max_position_embeddings
    lengths = torch.arange(1, positions + 1, dtype=torch.float64).clamp(min=trained)
    growth = (rope.factor * lengths / trained - (rope.factor - 1)) ** (dim / (dim - 2))
    bases = (rope.theta * growth).float()
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / bases[:, None] ** exponents[None, :]
