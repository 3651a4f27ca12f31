"""The command line: what is refused before anything starts, exit codes, machine output."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchtp import __version__
from batchtp.cli import app
from batchtp.cli.progress import Pace, duration
from batchtp.cli.unfinished import UnfinishedRun
from batchtp.settings import Settings

COMMANDS = [
    "run",
    "submit",
    "status",
    "watch",
    "results",
    "cancel",
    "list",
    "worker",
    "up",
    "down",
    "migrate",
    "config",
    "doctor",
    "model",
]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BATCHTP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def cli() -> CliRunner:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def test_version(cli: CliRunner) -> None:
    assert cli.invoke(app, ["--version"]).stdout == f"batchtp {__version__}\n"


def test_help_names_every_command(cli: CliRunner) -> None:
    text = cli.invoke(app, ["--help"]).stdout
    assert [name for name in COMMANDS if name not in text] == []


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "model"])
def test_every_command_has_machine_output(cli: CliRunner, command: str) -> None:
    assert "--json" in cli.invoke(app, [command, "--help"]).stdout


def test_config_shows_every_setting_with_its_source(
    cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHTP_TP", "3")
    monkeypatch.setenv("BATCHTP_REDIS_URL", "redis://:hunter2@r/0")
    monkeypatch.setenv("BATCHTP_DATABASE_URL", "postgresql://me:hunter2@p/d")
    result = cli.invoke(app, ["config", "--json"])
    shown = json.loads(result.stdout)
    assert set(shown) == {f.name for f in fields(Settings)} - {"sources"}
    assert shown["tp"]["value"] == 3
    assert shown["tp"]["source"] == "environment BATCHTP_TP"
    assert "hunter2" not in result.output + cli.invoke(app, ["config"]).output


def test_an_unknown_setting_is_wrong_use(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHTP_TPP", "3")
    result = cli.invoke(app, ["config"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Unknown setting BATCHTP_TPP" in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHTP_TPP", "3")
    result = cli.invoke(app, ["config", "--debug"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.jsonl"], 2, "Cannot read missing.jsonl: No such file"),
        (["."], 2, "Cannot read .: Is a directory"),
        (["empty.jsonl"], 2, "empty.jsonl is empty"),
        (["good.jsonl", "--output", "no/where.jsonl"], 2, "there is no directory"),
        (["good.jsonl", "--model", "no-such-model"], 6, "no-such-model"),
        (["good.jsonl", "--tp", "0"], 2, "0 is below the least value, 1"),
        (["good.jsonl", "--device", "tpu"], 2, "not one of auto, cpu, cuda"),
    ],
)
def test_run_refuses_before_it_starts_anything(
    cli: CliRunner, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    Path("empty.jsonl").touch()
    Path("good.jsonl").write_text('{"prompt": "x"}\n')
    result = cli.invoke(app, ["run", *arguments])
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "home" / "services").exists()


def test_embedded_services_cannot_be_started_when_urls_are_set(
    cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHTP_REDIS_URL", "redis://r/0")
    monkeypatch.setenv("BATCHTP_DATABASE_URL", "postgresql://p/d")
    for command in ("up", "down"):
        result = cli.invoke(app, [command])
        assert (result.exit_code, "no embedded services" in result.stderr) == (2, True)


def test_down_with_nothing_running(cli: CliRunner) -> None:
    assert json.loads(cli.invoke(app, ["down", "--json"]).stdout) == {"stopped": False}


def test_an_interrupted_run_keeps_its_batch_id(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("{}\n")
    first, again = UnfinishedRun(tmp_path, file, "m").batch_id()
    assert not again
    assert UnfinishedRun(tmp_path, file, "m").batch_id() == (first, True)
    assert UnfinishedRun(tmp_path, file, "other").batch_id()[0] != first
    UnfinishedRun(tmp_path, file, "m").forget()
    assert UnfinishedRun(tmp_path, file, "m").batch_id()[0] != first


def test_pace_and_durations() -> None:
    pace = Pace()
    assert pace.tokens_per_second == 0.0
    assert pace.eta_secs(4) is None
    # Five rows were done before (a resumed batch), and the model loads for a minute.
    pace.add(-60.0, 0, 5)
    for second in range(31):
        pace.add(float(second), 10 * second, 5 + second // 10)
    assert pace.tokens_per_second == pytest.approx(10.0)
    assert pace.eta_secs(12) == pytest.approx(40.0)
    pace.add(31.0, 290, 8)
    assert pace.tokens_per_second > 8.0
    pace.add(32.0, 0, 8)
    assert pace.tokens_per_second == 0.0
    assert [duration(s) for s in (4.6, 65, 3700)] == ["5 s", "1:05 min", "1:01 h"]
