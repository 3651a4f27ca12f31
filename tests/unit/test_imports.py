"""What importing a module loads, transitively: static contracts cannot see that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRONT = [
    "batchtp.cli",
    "batchtp.client",
    "batchtp.services",
    "batchtp.store",
    "batchtp.worker.app",
    "batchtp.worker.supervisor",
    "batchtp.worker.scheduler",
    "batchtp.worker.tokenizer",
]
ENGINE = ["batchtp.worker.rank", "batchtp.model.loader", "batchtp.kernels.ops"]
LOADED = "import sys, {}; print(*{{m.partition('.')[0] for m in sys.modules}})"


def loaded_by(module: str) -> set[str]:
    command = [sys.executable, "-c", LOADED.format(module)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("module", FRONT)
def test_the_front_loads_no_torch(module: str) -> None:
    assert not loaded_by(module) & {"torch", "transformers", "triton"}


@pytest.mark.parametrize("module", ENGINE)
def test_the_engine_loads_no_queue_and_no_database(module: str) -> None:
    unwanted = {"celery", "kombu", "redis", "sqlalchemy", "psycopg", "typer", "triton"}
    assert not loaded_by(module) & unwanted


@pytest.mark.parametrize("module", ["batchtp", "batchtp.bootstrap", "batchtp.core"])
def test_the_beginnings_need_the_standard_library_only(module: str) -> None:
    # Without site packages there is nothing else to import.
    command = [sys.executable, "-S", "-c", f"import {module}"]
    subprocess.run(command, check=True, cwd=ROOT)
