"""`batchtp doctor`: is this machine fit to work, before a batch trusts it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import typer

from batchtp import services
from batchtp.cli import options
from batchtp.cli.failures import handled
from batchtp.cli.output import emit_json, emit_table
from batchtp.client import ping_broker
from batchtp.errors import BatchtpError
from batchtp.model.config import load_config
from batchtp.model.resolve import resolve_model
from batchtp.settings import Settings, mask_url
from batchtp.store import Store

# gloo and NCCL pass tensors of ranks on one host through shared memory; containers often get 64 MB.
_LEAST_SHM_BYTES = 256 << 20
_LEAST_DISK_BYTES = 1 << 30
_TORCH_SECS = 120.0

_TORCH_FACTS = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if cuda else [],
    "bfloat16": torch.backends.cpu.get_cpu_capability(),
    "threads": torch.get_num_threads(),
    "nccl": torch.distributed.is_nccl_available(),
    "gloo": torch.distributed.is_gloo_available(),
}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `verdict` is ok, warning or failed."""

    what: str
    verdict: str
    detail: str


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


@handled
def doctor(
    model: options.Model = None,
    tp: options.Tp = None,
    device: options.Device = None,
    home: options.Home = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Check services, devices, shared memory, model files and disk (exit code 1: a failure)."""
    settings = options.settings_for(debug, home=home, model=model, tp=tp, device=device)
    findings = list(_examine(settings))
    failed = any(f.verdict == "failed" for f in findings)
    if as_json:
        emit_json({"ok": not failed, "findings": [asdict(f) for f in findings]})
    else:
        emit_table(["what", "verdict", "detail"], [(f.what, f.verdict, f.detail) for f in findings])
    if failed:
        raise typer.Exit(1)


def _examine(settings: Settings) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield from _services(settings)
    yield _torch(settings)
    yield _shared_memory(settings)
    yield _checked("model", lambda: _model(settings))
    yield _disk(settings)


def _services(settings: Settings) -> Iterator[Finding]:
    try:
        endpoints = services.ensure(settings)
    except BatchtpError as error:
        yield Finding("services", "failed", str(error))
        return
    try:
        broker, database = endpoints.redis_url, endpoints.database_url
        yield _checked("broker", lambda: f"{ping_broker(broker)} at {mask_url(broker)}")
        yield _checked("database", lambda: f"{_database(database)} at {mask_url(database)}")
    finally:
        services.release(settings)


def _database(url: str) -> str:
    with Store(url) as store:
        return store.health()


def _torch(settings: Settings) -> Finding:
    # In a process of its own: this one must not load torch.
    command = [sys.executable, "-c", _TORCH_FACTS]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TORCH_SECS, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("devices", "failed", f"torch did not load in {_TORCH_SECS:.0f} s")
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("devices", "failed", f"torch cannot be loaded: {last}")
    facts = json.loads(result.stdout)
    gpus = facts["devices"]
    detail = f"torch {facts['torch']}, {os.cpu_count()} CPU cores ({facts['bfloat16']})"
    detail += f", GPUs: {', '.join(gpus)}" if gpus else ", no GPU: ranks run on the CPU"
    if settings.device == "cuda" and len(gpus) < settings.tp:
        return Finding("devices", "failed", f"{detail}; tp {settings.tp} needs {settings.tp} GPUs")
    if not facts["gloo"]:
        return Finding("devices", "failed", f"{detail}; this torch has no gloo")
    return Finding("devices", "ok", detail)


def _shared_memory(settings: Settings) -> Finding:
    try:
        facts = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("shared memory", "warning", f"/dev/shm: {error.strerror}")
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    detail = f"/dev/shm {_gib(size)}, {_gib(free)} free"
    if settings.tp > 1 and free < _LEAST_SHM_BYTES:
        return Finding("shared memory", "warning", f"{detail}: little for {settings.tp} ranks")
    return Finding("shared memory", "ok", detail)


def _model(settings: Settings) -> str:
    resolved = resolve_model(settings.model, settings.home_path)
    config = load_config(resolved.path)
    return f"{resolved.name}: {config.architecture}, {config.num_layers} layers, {resolved.path}"


def _disk(settings: Settings) -> Finding:
    folder = settings.home_path
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    verdict = "ok" if free >= _LEAST_DISK_BYTES else "warning"
    return Finding("disk", verdict, f"{_gib(free)} free for {settings.home_path}")


def _checked(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, "ok", check())
    except BatchtpError as error:
        return Finding(what, "failed", str(error))


def _gib(count_bytes: int) -> str:
    return f"{count_bytes / (1 << 30):.1f} GiB"
