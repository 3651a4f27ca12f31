"""The options that several commands share, and the settings they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from batchtp import logs
from batchtp.model.resolve import resolve_model
from batchtp.settings import Settings, load_settings

Json = Annotated[
    bool, typer.Option("--json", help="Machine output: JSON on standard output, nothing else.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")]
Home = Annotated[
    str | None, typer.Option("--home", help="Data directory.", metavar="DIR", show_default=False)
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Directory, GGUF file, hub id or demo name.", show_default=False
    ),
]
Tp = Annotated[
    int | None,
    typer.Option("--tp", help="Tensor-parallel degree.", show_default=False),
]
Device = Annotated[
    str | None, typer.Option("--device", help="auto, cpu or cuda.", show_default=False)
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="auto, float32, float16 or bfloat16.", show_default=False),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="none, or int4: round an unquantised checkpoint at load.",
        show_default=False,
    ),
]


def served_name(settings: Settings, model: str | None) -> str:
    """What clients call this model, or the settings' one: a path goes by the name of its files."""
    given = model or settings.served_name or settings.model
    is_path = Path(given).expanduser().exists()
    return resolve_model(given, settings.home_path).name if is_path else given


def settings_for(debug: bool, **flags: Any) -> Settings:
    """The settings with these flags on top (None: not given), and logging set up by them."""
    if debug:
        flags["log_level"] = "debug"
    settings = load_settings(flags)
    logs.configure(settings.log_level, settings.log_format)
    return settings
