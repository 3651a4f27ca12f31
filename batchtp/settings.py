"""Settings: read once, validated once, passed as arguments.

A value comes from, first wins: a command-line flag, `BATCHTP_<NAME>` in the environment,
`config.toml` in the home directory (or the file BATCHTP_CONFIG names), the default. Unknown
`BATCHTP_…` variables and unknown keys are errors: a misspelt setting is never ignored.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from batchtp.core import DEMO_MODEL
from batchtp.errors import SettingsError

PREFIX = "BATCHTP_"


def _setting(default: Any, doc: str, **meta: Any) -> Any:
    return field(default=default, metadata={"doc": doc, **meta})


def _default_home() -> str:
    base = os.environ.get("XDG_DATA_HOME") or os.path.join("~", ".local", "share")
    return os.path.join(base, "batchtp")


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting of batchtp, with its default. `sources` says where each value came from."""

    home: str = _setting("", "Data directory: embedded services, downloads, config.toml.")
    redis_url: str = _setting(
        "", "Broker (redis://, rediss://, redis+socket://). Empty: embedded Valkey.", secret="url"
    )
    database_url: str = _setting(
        "", "Postgres (postgresql+psycopg://…). Empty: embedded Postgres.", secret="url"
    )
    key_prefix: str = _setting("batchtp", "Prefix of every Redis key and queue.")
    model: str = _setting(DEMO_MODEL, "Model to serve: directory, GGUF file, hub id or demo name.")
    served_name: str = _setting("", "Name that clients use for the model. Empty: the model's own.")
    tp: int = _setting(1, "Tensor-parallel degree: ranks in the group.", low=1, high=64)
    device: str = _setting("auto", "Where ranks run.", choices=("auto", "cpu", "cuda"))
    dtype: str = _setting(
        "auto",
        "Compute dtype. auto: the checkpoint's on a GPU; on a CPU float32, or bfloat16 where the "
        "CPU has bfloat16 instructions.",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    quantize: str = _setting(
        "none",
        "int4: round the linears of an unquantised checkpoint at load.",
        choices=("none", "int4"),
    )
    weight_cache: str = _setting(
        "auto",
        "Directory of shards ready for the device, for a quick second load. auto: under the home. "
        "off: none.",
    )
    weight_cache_gib: float = _setting(100.0, "Most GiB the weight cache may hold.", low=0)
    max_model_len: int = _setting(0, "Longest prompt + output, tokens. 0: the model's.", low=0)
    max_sequences: int = _setting(64, "Sequences that may run at once.", low=1)
    max_batched_tokens: int = _setting(1024, "Token budget of one step.", low=1)
    chunked_prefill: bool = _setting(True, "Split long prompts over steps, mixed with decode.")
    block_size: int = _setting(16, "Tokens in one KV-cache block.", low=1)
    kv_blocks: int = _setting(0, "KV-cache blocks. 0: from free memory.", low=0)
    memory_fraction: float = _setting(
        0.9, "Share of device memory that weights and cache may fill.", low=0.05, high=0.98
    )
    startup_timeout_secs: float = _setting(600.0, "Budget for ranks to join and load.", low=1)
    step_timeout_secs: float = _setting(
        0.0, "A step later than this is a fault. 0: 120 on a GPU, 600 on a CPU.", low=0
    )
    max_restarts: int = _setting(5, "Group restarts in ten minutes before giving up.", low=0)
    max_attempts: int = _setting(3, "Attempts at a chunk before its rows fail.", low=1)
    chunk_requests: int = _setting(32, "Most requests in a chunk (one message).", low=1, high=4096)
    chunk_bytes: int = _setting(
        1_000_000, "Most uncompressed bytes of requests in a chunk.", low=1024
    )
    max_line_bytes: int = _setting(8_000_000, "Longest line accepted, bytes.", low=1024)
    worker_chunks: int = _setting(4, "Chunks one worker works on at once.", low=1)
    lease_secs: float = _setting(30.0, "A lease without a heartbeat lasts this long.", low=1)
    heartbeat_secs: float = _setting(1.0, "Between heartbeats of a lease.", low=0.05)
    sweep_secs: float = _setting(5.0, "Between sweeps for lost or expired work.", low=0.1)
    visibility_timeout_secs: float = _setting(
        120.0, "Redis redelivers an unacknowledged message after this; above the lease.", low=2
    )
    accept_timeout_secs: float = _setting(60.0, "How long submit waits for acceptance.", low=0.1)
    grace_secs: float = _setting(20.0, "SIGTERM: time for running requests to finish.", low=0)
    retention_days: float = _setting(30.0, "Finished batches are purged after this.", low=0)
    log_level: str = _setting(
        "info", "Least severe log line.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = _setting(
        "text", "Log lines for people or machines.", choices=("text", "json")
    )
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def home_path(self) -> Path:
        """The data directory, absolute."""
        return Path(self.home).expanduser().absolute()

    @property
    def weight_cache_path(self) -> Path | None:
        """Where shards are kept; None where none are."""
        if self.weight_cache == "off" or not self.weight_cache_gib:
            return None
        if self.weight_cache == "auto":
            return self.home_path / "weights"
        return Path(self.weight_cache).expanduser().absolute()

    def shown(self, name: str) -> str:
        """The value as it may be printed: credentials in a URL are masked."""
        value = getattr(self, name)
        meta = next(f.metadata for f in fields(self) if f.name == name)
        return mask_url(value) if meta.get("secret") == "url" and value else str(value)


def load_settings(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from flags (None values are 'not given'), the environment, the file, defaults.

    Raises SettingsError on an unknown name, a bad value or an unreadable file.
    """
    env = os.environ if environ is None else environ
    given = {k: v for k, v in (flags or {}).items() if v is not None}
    from_env = _environment(env)
    home = str(given.get("home") or from_env.get("home") or _default_home())
    path = Path(env.get(PREFIX + "CONFIG") or Path(home).expanduser() / "config.toml")
    from_file = _read_file(path, must_exist=PREFIX + "CONFIG" in env)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for spec in _specs():
        for source, place in (
            (given, "flag"),
            (from_env, f"environment {PREFIX}{spec.name.upper()}"),
            (from_file, f"file {path}"),
        ):
            if spec.name in source:
                values[spec.name] = _convert(spec, source[spec.name], place)
                sources[spec.name] = place
                break
        else:
            sources[spec.name] = "default"
    _refuse_unknown(given, "flag")
    _refuse_unknown(from_file, f"file {path}")
    values["home"] = str(Path(values.get("home") or home).expanduser().absolute())
    settings = Settings(**values, sources=sources)
    _check_together(settings)
    return settings


def mask_url(url: str) -> str:
    """The URL with its password, and any query value that looks like one, replaced by ***."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user = parts.username or ""
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:***@{host}"))


def _specs() -> tuple[Any, ...]:
    return tuple(f for f in fields(Settings) if f.name != "sources")


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    names = {PREFIX + f.name.upper(): f.name for f in _specs()}
    # Read elsewhere: the config file's own place, and switches of tests and kernels.
    others = {PREFIX + "CONFIG", PREFIX + "KERNELS"}
    unknown = sorted(k for k in env if k.startswith(PREFIX) and k not in names and k not in others)
    if unknown:
        raise SettingsError(
            f"Unknown setting {', '.join(unknown)} in the environment; "
            "`batchtp config` lists the settings there are."
        )
    return {names[k]: v for k, v in env.items() if k in names}


def _read_file(path: Path, must_exist: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if must_exist:
            raise SettingsError(f"BATCHTP_CONFIG names {path}, which does not exist.") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"Cannot read the settings file {path}: {error}") from error


def _refuse_unknown(source: Mapping[str, Any], place: str) -> None:
    known = {f.name for f in _specs()}
    unknown = sorted(set(source) - known)
    if unknown:
        raise SettingsError(f"Unknown setting {', '.join(unknown)} ({place}).")


_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def _convert(spec: Any, value: Any, place: str) -> Any:
    kind = {"str": str, "int": int, "float": float, "bool": bool}[spec.type]
    where = f"Setting {spec.name} ({place})"
    try:
        if kind is bool:
            result: Any = _to_bool(value)
        elif isinstance(value, bool):
            raise ValueError("a yes/no value")
        else:
            result = kind(value)
    except (TypeError, ValueError):
        raise SettingsError(f"{where}: {value!r} is not a {kind.__name__}.") from None
    meta = spec.metadata
    if "choices" in meta and result not in meta["choices"]:
        raise SettingsError(f"{where}: {result!r} is not one of {', '.join(meta['choices'])}.")
    if "low" in meta and not result >= meta["low"]:
        raise SettingsError(f"{where}: {result} is below the least value, {meta['low']}.")
    if "high" in meta and not result <= meta["high"]:
        raise SettingsError(f"{where}: {result} is above the greatest value, {meta['high']}.")
    return result


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE | _FALSE:
        return text in _TRUE
    raise ValueError(text)


def _check_together(s: Settings) -> None:
    if s.heartbeat_secs * 3 > s.lease_secs:
        raise SettingsError(
            f"heartbeat_secs ({s.heartbeat_secs}) must be at most a third of lease_secs "
            f"({s.lease_secs}), or one late heartbeat loses the lease."
        )
    if s.visibility_timeout_secs <= s.lease_secs:
        raise SettingsError(
            f"visibility_timeout_secs ({s.visibility_timeout_secs}) must be above lease_secs "
            f"({s.lease_secs}), or Redis redelivers work that is still leased."
        )
    if bool(s.redis_url) != bool(s.database_url):
        raise SettingsError(
            "Set both BATCHTP_REDIS_URL and BATCHTP_DATABASE_URL, or neither (then batchtp runs "
            "its own): a broker without its database, or the reverse, mixes two deployments."
        )
