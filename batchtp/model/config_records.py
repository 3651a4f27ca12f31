"""The records that a checkpoint's config becomes. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from batchtp.model.quantization import QuantConfig

# No decoder comes near it; a corrupt config must not make tables of what it claims.
MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding, in transformers' terms. What a `kind` does not use is left alone.

    `original_max_position_embeddings`: positions before scaling. `attention_factor` None: from
    `factor` (and from both mscales where they are set).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama and Qwen families, whatever file format it came in.

    `attention_bias` is for q, k and v. `sliding_layers` are the layers that see no further back
    than `sliding_window` tokens. `torch_dtype` names the unquantised tensors' dtype.
    `eos_token_ids`: every id that any of the checkpoint's files says ends a text.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    sliding_layers: frozenset[int] = frozenset()
    hidden_act: str = "silu"
    torch_dtype: str = "float16"
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    quantization: QuantConfig | None = None

    def window(self, layer: int) -> int:
        """Tokens that the layer's attention sees back, itself included; 0: all of them."""
        return self.sliding_window or 0 if layer in self.sliding_layers else 0
