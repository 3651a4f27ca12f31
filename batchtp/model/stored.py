"""How a checkpoint stores each linear, from its config and its files' headers alone. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchtp.errors import UnsupportedModelError
from batchtp.model.config import ModelConfig, load_config
from batchtp.model.gguf import Q4_0, Q4_1, GgufTensor, open_gguf
from batchtp.model.names import (
    DOWN,
    GATE,
    LM_HEAD,
    UP,
    K,
    O,
    Q,
    V,
    check_names,
    gguf_module,
    layer_module,
)
from batchtp.model.quantization import COMPRESSED_TENSORS, GGUF, QuantConfig
from batchtp.model.safetensors_index import TensorInfo, index_tensors

_FLOAT_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
_UINT8_BYTES, _HALF_BYTES = 1, 2
_GGUF_BLOCK = 32
# See kernels.round_to_int4.
ROUNDED_GROUP_ROWS = 64


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A linear that a rank holds in four bits. `group_size` 0: one group per output.

    `scale_bytes`, `zero_bytes`: of one scale and one zero point in memory.
    """

    form: str
    inputs: int
    group_size: int
    scale_bytes: int
    zero_bytes: int
    act_order: bool = False


@dataclass(frozen=True, slots=True)
class StoredModel:
    """`tensors`: the kind and bytes of every tensor in the files, by the files' own names."""

    config: ModelConfig
    tensors: Mapping[str, tuple[str, int]]
    linears: Mapping[str, StoredLinear]

    def linear(self, module: str) -> StoredLinear | None:
        """How a linear is held; None: dense, in the dtype that is computed in."""
        return self.linears.get(module)


def open_stored(path: Path, *, quantize: str = "none") -> StoredModel:
    """Look into a checkpoint's headers. `quantize`: as the setting of that name.

    Raises ModelError as loading would.
    """
    config = load_config(path)
    if path.is_file():
        tensors, linears = _gguf(path, config)
    else:
        tensors, linears = _hf(path, config)
    if quantize == "int4":
        quantised = config.quantization is not None and config.quantization.method != GGUF
        if quantised:
            raise UnsupportedModelError(
                f"{path} is quantised already; quantize=int4 is not for it."
            )
        linears = _rounded(config) | linears
    return StoredModel(config, tensors, linears)


def _modules(config: ModelConfig) -> dict[str, int]:
    """Every linear's name and inputs."""
    hidden, q = config.hidden_size, config.num_heads * config.head_dim
    parts = dict.fromkeys((Q, K, V, GATE, UP), hidden) | {O: q, DOWN: config.intermediate_size}
    layers = range(config.num_layers)
    found = {layer_module(i, part): k for i in layers for part, k in parts.items()}
    return found if config.tie_word_embeddings else found | {LM_HEAD: hidden}


def _hf(
    path: Path, config: ModelConfig
) -> tuple[dict[str, tuple[str, int]], dict[str, StoredLinear]]:
    files = index_tensors(path)
    check_names(files, config, path, gguf=False)
    linears = {}
    if config.quantization is not None:
        for module, inputs in _modules(config).items():
            stored = _hf_linear(files, config.quantization, module, inputs)
            if stored is not None:
                linears[module] = stored
    return {name: (info.dtype, info.nbytes) for name, info in files.items()}, linears


def _hf_linear(
    files: Mapping[str, TensorInfo], quantization: QuantConfig, module: str, inputs: int
) -> StoredLinear | None:
    packed = quantization.method == COMPRESSED_TENSORS
    marker, scale, index = (
        ("weight_packed", "weight_scale", "weight_g_idx")
        if packed
        else ("qweight", "scales", "g_idx")
    )
    if f"{module}.{marker}" not in files or f"{module}.{scale}" not in files:
        return None
    scheme = quantization.scheme(module)
    # Eight bits are dequantised as they are loaded.
    if scheme.bits != 4:
        return None
    groups = f"g{scheme.group_size}" if scheme.group_size else "per output"
    act_order = scheme.desc_act and f"{module}.{index}" in files
    return StoredLinear(
        form=f"int4 {groups}" + (" act-order" if act_order else ""),
        inputs=inputs,
        group_size=scheme.group_size,
        scale_bytes=_FLOAT_BYTES.get(files[f"{module}.{scale}"].dtype, _HALF_BYTES),
        zero_bytes=_UINT8_BYTES,
        act_order=act_order,
    )


def _gguf(
    path: Path, config: ModelConfig
) -> tuple[dict[str, tuple[str, int]], dict[str, StoredLinear]]:
    file = open_gguf(path)
    check_names(file.tensors, config, path, gguf=True)
    linears = {}
    for module, inputs in _modules(config).items():
        tensor = file.tensors.get(f"{gguf_module(module)}.weight")
        stored = _gguf_linear(tensor, inputs) if tensor is not None else None
        if stored is not None:
            linears[module] = stored
    return {name: (t.type.name, t.nbytes) for name, t in file.tensors.items()}, linears


def _gguf_linear(tensor: GgufTensor, inputs: int) -> StoredLinear | None:
    if tensor.type not in (Q4_0, Q4_1):
        return None
    return StoredLinear(
        form=f"int4 g{_GGUF_BLOCK}",
        inputs=inputs,
        group_size=_GGUF_BLOCK,
        scale_bytes=_HALF_BYTES,
        zero_bytes=_HALF_BYTES if tensor.type is Q4_1 else _UINT8_BYTES,
    )


def _rounded(config: ModelConfig) -> dict[str, StoredLinear]:
    return {
        module: StoredLinear(
            form=f"int4 g{ROUNDED_GROUP_ROWS}",
            inputs=inputs,
            group_size=ROUNDED_GROUP_ROWS,
            scale_bytes=_HALF_BYTES,
            zero_bytes=_UINT8_BYTES,
        )
        for module, inputs in _modules(config).items()
        if module != LM_HEAD
    }
