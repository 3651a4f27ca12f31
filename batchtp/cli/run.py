"""`batchtp run`: the whole main job on this machine, prompts file in, results file out."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from batchtp.cli import options
from batchtp.cli.connection import connected
from batchtp.cli.failures import Terminated, handled
from batchtp.cli.local_worker import Serving
from batchtp.cli.output import emit_json, emit_text, note
from batchtp.cli.progress import ProgressView, duration, show_progress
from batchtp.cli.shown import status_document
from batchtp.cli.unfinished import UnfinishedRun
from batchtp.cli.written import check_writable, write_results
from batchtp.client import Batch, Client
from batchtp.core import BatchState, BatchStatus
from batchtp.errors import EngineError, InputError, UsageError
from batchtp.model.config import load_config
from batchtp.model.resolve import resolve_model
from batchtp.settings import Settings

SOME_FAILED = 3
_POLL_SECS = 0.2
# After Ctrl-C: the batch is kept, so running requests need not finish.
_HURRIED_SECS = 1.0
# A run that was killed leaves leases; the next one should not wait long for their end.
_LEASE_SECS = 10.0
_SHOWN_COMPLETIONS = 3
_SHOWN_CHARACTERS = 72


@dataclass(frozen=True, slots=True)
class Job:
    """What one run is asked to do."""

    file: Path
    output: Path
    errors: Path
    strict: bool
    text: bool


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(run)


@handled
def run(
    file: Annotated[Path, typer.Argument(help="Prompts, JSON lines.", show_default=False)],
    model: options.Model = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Default: NAME.output.jsonl.", show_default=False),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option("--errors", help="Default: NAME.errors.jsonl.", show_default=False),
    ] = None,
    tp: options.Tp = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantize: options.Quantize = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse the file if any line is bad.")
    ] = False,
    text: Annotated[bool, typer.Option("--text", help="Every line is a plain prompt.")] = False,
    home: options.Home = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Run a file of prompts from start to end: services, worker, batch, results.

    Started again after an interruption, the same command goes on where it was.
    Exit code 3: done, but some requests failed (see the error file).
    """
    settings = options.settings_for(
        debug, home=home, model=model, tp=tp, device=device, dtype=dtype, quantize=quantize
    )
    stem = file.name.removesuffix(".gz").removesuffix(".jsonl") or "batch"
    job = Job(
        file=file,
        output=output or Path(f"{stem}.output.jsonl"),
        errors=errors or Path(f"{stem}.errors.jsonl"),
        strict=strict,
        text=text,
    )
    name = _check(job, settings)
    with _terminated_like_interrupted():
        report = _run(job, settings, name)
    if as_json:
        emit_json(report)
    else:
        _summarise(report)
    if report["failed"]:
        raise typer.Exit(SOME_FAILED)


def _check(job: Job, settings: Settings) -> str:
    """Refuse before anything is started what can be refused; the name the model is served by."""
    try:
        with job.file.open("rb") as stream:
            if not stream.read(1):
                raise InputError(f"{job.file} is empty.", code="empty_file")
    except OSError as error:
        raise InputError(f"Cannot read {job.file}: {error.strerror}.") from error
    check_writable(job.output, job.errors)
    model = resolve_model(settings.model, settings.home_path)
    load_config(model.path)
    return settings.served_name or model.name


def _run(job: Job, settings: Settings, name: str) -> dict[str, Any]:
    started = time.monotonic()
    with ProgressView() as view:
        view.phase("starting services")
        with connected(settings) as reachable:
            report = _deliver(job, _with_short_lease(reachable), name, view)
            view.phase("stopping")
    return {**report, "seconds": round(time.monotonic() - started, 3)}


def _with_short_lease(settings: Settings) -> Settings:
    if settings.sources["lease_secs"] != "default":
        return settings
    return replace(settings, lease_secs=max(_LEASE_SECS, 3 * settings.heartbeat_secs))


def _deliver(job: Job, settings: Settings, name: str, view: ProgressView) -> dict[str, Any]:
    """Submit, follow, write the results; what there is to say about it."""
    unfinished = UnfinishedRun(settings.home_path, job.file, name, str(job.text))
    with Client(settings) as client, _serving(client, settings, name, view) as serving:
        batch = _submit(client, job, name, unfinished)
        status = _follow(client, batch, serving, view)
        _require_completed(status, unfinished)
        view.phase("writing")
        written, failed = write_results(batch, job.output, job.errors)
        shown = _first_completions(batch)
    unfinished.forget()
    return {
        **status_document(status),
        "tokens_per_second": view.pace.overall_tokens_per_second,
        "written": written,
        "failed": failed,
        "output": str(job.output),
        "errors": str(job.errors) if failed else None,
        "shown": shown,
    }


@contextmanager
def _serving(
    client: Client, settings: Settings, model: str, view: ProgressView
) -> Iterator[Serving]:
    """Somebody who serves the model for as long as this lasts."""
    serving = Serving(client, settings, model)
    ours = serving.look()
    view.phase("starting the worker" if ours else "a running worker serves the model")
    orderly = False
    try:
        yield serving
        orderly = True
    finally:
        serving.stop(settings.grace_secs if orderly else _HURRIED_SECS)


def _submit(client: Client, job: Job, model: str, unfinished: UnfinishedRun) -> Batch:
    batch_id, resumed = unfinished.batch_id()
    if resumed:
        note(f"Going on with {batch_id}, which an earlier run left unfinished.")
    try:
        return client.submit(
            job.file,
            model=model,
            batch_id=batch_id,
            strict=job.strict,
            text=job.text,
            wait=False,
        )
    except UsageError:
        unfinished.forget()
        raise


def _follow(client: Client, batch: Batch, serving: Serving, view: ProgressView) -> BatchStatus:
    """Show the batch until it is final. Raises EngineError as soon as our worker is gone."""
    while True:
        status = batch.status()
        show_progress(view, client, status)
        if status.state.final:
            return status
        serving.look()
        time.sleep(_POLL_SECS)


def _require_completed(status: BatchStatus, unfinished: UnfinishedRun) -> None:
    if status.state is BatchState.COMPLETED:
        return
    # There is nothing to go on with.
    unfinished.forget()
    why = f": {status.error.message}" if status.error else ""
    raise EngineError(f"Batch {status.id} ended {status.state.value}{why}.")


def _first_completions(batch: Batch) -> list[tuple[str, str]]:
    shown: list[tuple[str, str]] = []
    for line in batch.output_lines():
        if len(shown) == _SHOWN_COMPLETIONS:
            break
        if line["error"] is None:
            choice = line["response"]["body"]["choices"][0]
            answer = choice["message"]["content"] if "message" in choice else choice["text"]
            shown.append((line["custom_id"], answer))
    return shown


def _summarise(report: dict[str, Any]) -> None:
    usage = report["usage"]
    for custom_id, answer in report["shown"]:
        line = " ".join(answer.split())
        cut = line[: _SHOWN_CHARACTERS - 1] + "…" if len(line) > _SHOWN_CHARACTERS else line
        emit_text(f"  {custom_id}: {cut}")
    speed = report["tokens_per_second"]
    emit_text(
        f"{report['written']} done, {report['failed']} failed in {duration(report['seconds'])}; "
        f"{usage['prompt_tokens']} tokens read, {usage['completion_tokens']} written"
        + (f" at {speed:.1f} tokens/s" if speed else "")
    )
    emit_text(f"results: {report['output']}")
    if report["errors"]:
        emit_text(f"errors:  {report['errors']}")


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM cleans up as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
