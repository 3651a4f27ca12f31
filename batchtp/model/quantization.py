"""What a config's quantization_config says, format by format. No torch.

Which modules are quantised is what the file stores; what is said here is how to read those that
are, and it is checked against the stored shapes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchtp.errors import CheckpointError, UnsupportedModelError

log = logging.getLogger(__name__)

AWQ, GPTQ, COMPRESSED_TENSORS, GGUF = "awq", "gptq", "compressed-tensors", "gguf"
_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class ModuleScheme:
    """How one module is quantised. `group_size` 0: one group per output feature."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool = False


@dataclass(frozen=True, slots=True)
class ModuleRule:
    """A scheme for the modules whose name a pattern matches; None: they are not quantised."""

    pattern: re.Pattern[str]
    scheme: ModuleScheme | None


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """A checkpoint's quantisation. `rules`: the first that matches a module's name wins over the
    checkpoint's own scheme.
    """

    method: str
    bits: int
    group_size: int
    sym: bool
    desc_act: bool = False
    checkpoint_format: str = ""
    rules: tuple[ModuleRule, ...] = ()

    def scheme(self, module: str) -> ModuleScheme:
        """How to read a module that the file stores quantised. `module`: its full name.

        Raises UnsupportedModelError for a width other than 4 and 8 bits.
        """
        own = ModuleScheme(self.bits, self.group_size, self.sym, self.desc_act)
        rule = next((rule for rule in self.rules if rule.pattern.match(module)), None)
        scheme = (rule.scheme if rule else None) or own
        if scheme.bits not in _BITS:
            raise UnsupportedModelError(
                f"{module} is quantised to {scheme.bits} bits; 4 and 8 are supported."
            )
        return scheme


def parse_quantization(raw: Mapping[str, Any], where: str) -> QuantConfig:
    """A quantization_config. `where` names its file in errors.

    Raises UnsupportedModelError for a method or layout that is not read, CheckpointError for a
    malformed value.
    """
    method = str(raw.get("quant_method") or raw.get("method") or _method_of(raw)).lower()
    parser = {AWQ: _awq, GPTQ: _gptq, COMPRESSED_TENSORS: _compressed_tensors}.get(method)
    if parser is None:
        raise UnsupportedModelError(
            f"{where}: quantisation {method!r} is not supported; {AWQ}, {GPTQ} and "
            f"{COMPRESSED_TENSORS} are. Export the model to one of them."
        )
    try:
        config = parser(raw, where)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, re.error) as error:
        raise CheckpointError(f"{where}: malformed quantisation config: {error!r}.") from error
    if config.bits not in _BITS:
        raise UnsupportedModelError(
            f"{where}: quantised to {config.bits} bits; 4 and 8 are supported."
        )
    return config


def _method_of(raw: Mapping[str, Any]) -> str:
    """Files of before `quant_method` was a key."""
    if "w_bit" in raw:
        return AWQ
    return GPTQ if "desc_act" in raw else "unnamed"


def _group_size(value: Any) -> int:
    """-1, 0 and null all mean one group per output feature."""
    size = 0 if value is None else int(value)
    if size < -1:
        raise ValueError(f"group_size {size}")
    return max(size, 0)


def _awq(raw: Mapping[str, Any], where: str) -> QuantConfig:
    bits = int(raw["bits"] if "bits" in raw else raw["w_bit"])
    version = str(raw.get("version") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(f"{where}: AWQ version {version!r}; only gemm is supported.")
    if bits != 4:
        raise UnsupportedModelError(f"{where}: AWQ with {bits} bits; only 4 is supported.")
    group_size = raw["group_size"] if "group_size" in raw else raw["q_group_size"]
    return QuantConfig(
        method=AWQ,
        bits=bits,
        group_size=_group_size(group_size),
        sym=not raw.get("zero_point", True),
        checkpoint_format=version,
    )


def _gptq(raw: Mapping[str, Any], where: str) -> QuantConfig:
    layout = str(raw.get("checkpoint_format") or raw.get("format") or GPTQ).lower()
    if raw.get("is_marlin_format"):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(
            f"{where}: GPTQ checkpoint_format {layout!r}; gptq and gptq_v2 are supported."
        )
    if raw.get("pack_dtype", "int32") != "int32":
        raise UnsupportedModelError(
            f"{where}: GPTQ pack_dtype {raw['pack_dtype']!r}; only int32 is supported."
        )
    own = ModuleScheme(
        bits=int(raw["bits"]),
        group_size=_group_size(raw["group_size"]),
        sym=bool(raw.get("sym", True)),
        desc_act=bool(raw.get("desc_act", False)),
    )
    dynamic = raw.get("dynamic") or {}
    return QuantConfig(
        method=GPTQ,
        bits=own.bits,
        group_size=own.group_size,
        sym=own.sym,
        desc_act=own.desc_act,
        checkpoint_format=layout,
        rules=tuple(_dynamic_rule(key, value or {}, own) for key, value in dynamic.items()),
    )


def _dynamic_rule(key: str, value: Mapping[str, Any], own: ModuleScheme) -> ModuleRule:
    """`-:regex` leaves modules alone; `+:regex`, or no prefix, overrides some of their values."""
    pattern = re.compile(key.removeprefix("-:").removeprefix("+:"))
    if key.startswith("-:"):
        return ModuleRule(pattern, None)
    scheme = own
    if "bits" in value:
        scheme = replace(scheme, bits=int(value["bits"]))
    if "group_size" in value:
        scheme = replace(scheme, group_size=_group_size(value["group_size"]))
    if "sym" in value:
        scheme = replace(scheme, sym=bool(value["sym"]))
    if "desc_act" in value:
        scheme = replace(scheme, desc_act=bool(value["desc_act"]))
    return ModuleRule(pattern, scheme)


def _compressed_tensors(raw: Mapping[str, Any], where: str) -> QuantConfig:
    _refuse_compressed_extras(raw, where)
    if raw.get("kv_cache_scheme"):
        log.warning(
            "%s: the KV cache is kept in the model's dtype, not in kv_cache_scheme's", where
        )
    groups = list(raw["config_groups"].values())
    if not groups:
        raise ValueError("no config_groups")
    schemes = [_group_scheme(group, raw, where) for group in groups]
    # A group for every Linear is the checkpoint's own scheme; names and patterns go before it.
    rules = [
        ModuleRule(_target_pattern(target), scheme)
        for group, scheme in zip(groups, schemes, strict=True)
        for target in group["targets"]
        if target != "Linear"
    ]
    own = next(
        (s for g, s in zip(groups, schemes, strict=True) if "Linear" in g["targets"]), schemes[0]
    )
    return QuantConfig(
        method=COMPRESSED_TENSORS,
        bits=own.bits,
        group_size=own.group_size,
        sym=own.sym,
        desc_act=own.desc_act,
        checkpoint_format="pack-quantized",
        rules=tuple(rules),
    )


def _refuse_compressed_extras(raw: Mapping[str, Any], where: str) -> None:
    sparsity = (raw.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModelError(f"{where}: sparsity format {sparsity!r} is not supported.")
    if raw.get("transform_config"):
        raise UnsupportedModelError(f"{where}: transform_config is not supported.")


def _group_scheme(group: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> ModuleScheme:
    layout = group.get("format") or raw.get("format")
    weights = group["weights"]
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    asked = {
        "format": (layout, "pack-quantized"),
        "weight type": (weights.get("type", "int"), "int"),
        "input_activations": (group.get("input_activations"), None),
        "output_activations": (group.get("output_activations"), None),
    }
    for name, (value, supported) in asked.items():
        if value != supported:
            raise UnsupportedModelError(
                f"{where}: compressed-tensors {name} {value!r} is not supported; "
                f"only {supported!r} is."
            )
    if strategy not in ("group", "channel"):
        raise UnsupportedModelError(
            f"{where}: compressed-tensors strategy {strategy!r}; group and channel are supported."
        )
    return ModuleScheme(
        bits=int(weights["num_bits"]),
        group_size=_group_size(weights.get("group_size")) if strategy == "group" else 0,
        sym=bool(weights.get("symmetric", True)),
        desc_act=weights.get("actorder") in ("group", "dynamic"),
    )


def _target_pattern(target: str) -> re.Pattern[str]:
    """A target is a regular expression after `re:`, else a module's name or the end of it."""
    if target.startswith("re:"):
        return re.compile(target.removeprefix("re:"))
    return re.compile(rf"(?:.*\.)?{re.escape(target)}$")
