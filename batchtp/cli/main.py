"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from batchtp import __version__
from batchtp.cli import batches, config, doctor, model, run, services, submit, watch, worker

app = typer.Typer(
    name="batchtp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchtp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Offline batch generation as a queue: prompts in, completions out, nothing lost.

    Exit codes: 0 done; 1 a fault; 2 wrong use, settings or input; 3 some requests failed;
    4 no such batch, or another under its id; 5 a service does not answer; 6 the model cannot be
    served; 7 the tensor-parallel group; 130 interrupted; 143 terminated.
    """


for group in (run, submit, batches, watch, worker, services, config, doctor, model):
    group.register(app)


def main() -> None:
    """Run the command that the arguments name, and exit."""
    app()
