"""Errors at the edge: one clear message and an exit code; the traceback with --debug."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from batchtp.cli.output import note
from batchtp.errors import BatchtpError
from batchtp.logs import mask

P = ParamSpec("P")
R = TypeVar("R")

# What shells report for a process that SIGINT or SIGTERM ended.
INTERRUPTED = 130
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised where the command is so that it cleans up as after Ctrl-C."""


def handled(command: Callable[P, R]) -> Callable[P, R]:
    """The command with its errors turned into messages and exit codes."""

    @functools.wraps(command)
    def wrapper(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return command(*arguments, **options)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt as stop:
            terminated = isinstance(stop, Terminated)
            note("Terminated." if terminated else "Interrupted.")
            raise typer.Exit(TERMINATED if terminated else INTERRUPTED) from None
        except BrokenPipeError:
            # The reader (head, less) has seen enough; spare the interpreter's own complaint.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except Exception as error:
            if options.get("debug"):
                note(mask(traceback.format_exc()))
            else:
                note(_message(error))
            code = error.exit_code if isinstance(error, BatchtpError) else 1
            raise typer.Exit(code) from None

    return wrapper


def _message(error: Exception) -> str:
    if isinstance(error, BatchtpError):
        return mask(f"Error: {error}")
    if isinstance(error, OSError) and error.filename is not None:
        return f"Error: {error.filename}: {error.strerror}"
    return mask(
        f"Error: {type(error).__name__}: {error}\n"
        "This is a fault in batchtp; --debug shows where it happened."
    )
