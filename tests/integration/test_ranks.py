"""Real rank processes: gloo groups driven by plans, and how a rank ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rank_driver import (
    DATA,
    HERE,
    RankGroup,
    all_checkpoints,
    demo_model,
    generate,
    group_config,
    part,
    receive_answer,
)

from batchtp.worker.messages import (
    Hello,
    Plan,
    RankFault,
    Ready,
    Shutdown,
    StartCache,
    receive,
    send,
)

OWN = [path for path in all_checkpoints() if path.parent == DATA]
TINY = DATA / "awq-g32-zero-range"
DEADLINE_SECS = 60

# "What is the capital of France?" is the first of them.
DEMO_CASES = json.loads((HERE / "data" / "demo_greedy.json").read_text())["cases"]


def named(path: Path) -> str:
    return path.name


def greedy_case(checkpoint: Path) -> tuple[list[list[int]], list[list[int]]]:
    prompts = json.loads((checkpoint / "expected.json").read_text())["prompts"]
    return [p["ids"] for p in prompts], [p["greedy_ids"] for p in prompts]


@pytest.mark.parametrize("checkpoint", OWN, ids=named)
def test_two_processes_give_the_expected_ids(checkpoint: Path, tmp_path: Path) -> None:
    prompts, greedy = greedy_case(checkpoint)
    with RankGroup(group_config(checkpoint, tp=2), tmp_path) as group:
        group.start()
        assert generate(group.step, prompts, 24) == greedy
        assert generate(group.step, prompts, 24, chunk=4) == greedy


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_demo_model_says_what_transformers_says(tp: int, tmp_path: Path) -> None:
    config = group_config(demo_model(), tp=tp)
    with RankGroup(config, tmp_path) as group:
        group.start()
        drawn = generate(group.step, [c["prompt_ids"] for c in DEMO_CASES], 12, chunk=25)
        for got, case in zip(drawn, DEMO_CASES, strict=True):
            count = min(12, len(case["greedy_ids"]))
            assert got[:count] == case["greedy_ids"][:count]


def test_ready_says_what_was_loaded(tmp_path: Path) -> None:
    with RankGroup(group_config(TINY, tp=2, kv_blocks=9), tmp_path, generation=5) as group:
        group.start()
        for rank, ready in enumerate(group.ready):
            assert (ready.rank, ready.generation, ready.kv_blocks) == (rank, 5, 9)
            assert (ready.max_model_len, ready.vocab_size) == (256, 391)
            assert ready.weight_bytes > 10_000
            assert ready.load_secs > 0


def test_plan_of_another_generation_is_dropped(tmp_path: Path) -> None:
    with RankGroup(group_config(TINY), tmp_path, generation=2) as group:
        group.start()
        slices = (part(0, [5, 6], 0, [0]),)
        group.generation = 1
        for sock in group.sockets:
            send(sock, Plan(1, 1, slices))
        group.generation = 2
        assert group.step(slices)


def test_shutdown_and_closed_socket_end_a_rank(tmp_path: Path) -> None:
    with RankGroup(group_config(TINY, tp=2), tmp_path) as group:
        group.start()
        send(group.sockets[0], Shutdown())
        group.sockets[1].close()
        assert [process.wait(DEADLINE_SECS) for process in group.processes] == [0, 0]


def test_closed_socket_before_hello_ends_a_rank(tmp_path: Path) -> None:
    group = RankGroup(group_config(TINY), tmp_path)
    with group:
        group.sockets[0].close()
        assert group.processes[0].wait(DEADLINE_SECS) == 0


def test_signals_meant_for_the_supervisor_are_ignored(tmp_path: Path) -> None:
    with RankGroup(group_config(TINY), tmp_path) as group:
        group.start()
        for number in (signal.SIGINT, signal.SIGTERM):
            group.processes[0].send_signal(number)
            assert group.step((part(0, [5, 6], 0, [0]),))


def damaged(folder: Path) -> Path:
    """A copy of a checkpoint whose weights file is cut short."""
    for source in TINY.iterdir():
        data = source.read_bytes()
        cut = len(data) // 2 if source.suffix == ".safetensors" else len(data)
        (folder / source.name).write_bytes(data[:cut])
    return folder


def test_bad_checkpoint_is_a_permanent_fault(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with RankGroup(group_config(damaged(model), tp=2), tmp_path) as group:
        for rank, fault in enumerate(group.receive_all()):
            assert isinstance(fault, RankFault)
            assert (fault.rank, fault.phase, fault.permanent) == (rank, "load", True)
            assert fault.kind == "CheckpointError"
            assert "Traceback" in fault.traceback
        assert [process.wait(DEADLINE_SECS) for process in group.processes] == [1, 1]


def test_context_past_the_model_is_a_permanent_fault(tmp_path: Path) -> None:
    with RankGroup(group_config(TINY, max_model_len=10**6), tmp_path) as group:
        (fault,) = group.receive_all()
        assert isinstance(fault, RankFault)
        assert (fault.kind, fault.permanent) == ("UnsupportedModelError", True)


def test_an_exception_in_a_step_is_a_fault_of_that_phase(tmp_path: Path) -> None:
    with RankGroup(group_config(TINY), tmp_path) as group:
        group.start(blocks=2)
        slices = (part(0, [5, 6], 0, [99]),)
        send(group.sockets[0], Plan(1, 1, slices))
        (fault,) = group.receive_all()
        assert isinstance(fault, RankFault)
        assert (fault.phase, fault.permanent) == ("step", False)
        assert group.processes[0].wait(DEADLINE_SECS) == 1


def test_a_killed_peer_is_a_fault_of_the_survivor(tmp_path: Path) -> None:
    with RankGroup(group_config(TINY, tp=2), tmp_path) as group:
        group.start()
        slices = (part(0, [5, 6], 0, [0]),)
        group.step(slices)
        group.processes[1].kill()
        group.processes[1].wait(DEADLINE_SECS)
        send(group.sockets[0], Plan(1, 2, slices))
        fault = receive(group.sockets[0])
        assert isinstance(fault, RankFault)
        assert (fault.rank, fault.phase, fault.permanent) == (0, "step", False)


PARENT = """
import os, subprocess, sys, time
fd = int(sys.argv[1])
command = [sys.executable, "-m", "batchtp.worker.rank", "--fd", str(fd)]
command += ["--parent", str(os.getpid())]
rank = subprocess.Popen(command, pass_fds=[fd])
time.sleep(600)
"""


def test_a_rank_dies_with_its_parent(tmp_path: Path) -> None:
    # The other end of the socket stays open here, so only the parent's death can end the rank.
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_SECS)
    with ours:
        with theirs:
            command = [sys.executable, "-c", PARENT, str(theirs.fileno())]
            parent = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        with parent:
            send(ours, Hello(group_config(TINY), 0, 1, str(tmp_path / "meeting")))
            assert isinstance(receive_answer(ours), Ready)
            parent.kill()
        with pytest.raises(EOFError):
            receive(ours)


def test_a_rank_whose_parent_died_before_it_could_ask_ends_at_once() -> None:
    # Its socket stays open and silent: nothing but the pid it was told can end it.
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "batchtp.worker.rank", "--fd", str(theirs.fileno())]
        command += ["--parent", str(os.getppid())]
        rank = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        assert rank.wait(DEADLINE_SECS) == 1


def test_rank_imports_neither_transformers_nor_the_front() -> None:
    code = (
        "import sys, batchtp.worker.rank, batchtp.worker.startup\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    unwanted = {"transformers", "celery", "redis", "sqlalchemy", "psycopg", "typer", "triton"}
    assert "torch" in found
    assert not unwanted & set(found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tp", "dtype"), [(1, "float16"), (2, "float16"), (3, "float16"), (2, "float32")]
)
def test_ranks_on_a_gpu_give_the_expected_ids(tp: int, dtype: str, tmp_path: Path) -> None:
    # With fewer cards than ranks they share one, and talk over gloo through host memory.
    for checkpoint in (TINY, DATA / "awq-g64", DATA / "ct-gptq-actgroup-g64"):
        prompts, greedy = greedy_case(checkpoint)
        config = group_config(checkpoint, tp=tp, device="cuda", dtype=dtype)
        (tmp_path / checkpoint.name).mkdir()
        with RankGroup(config, tmp_path / checkpoint.name) as group:
            group.start()
            assert all(ready.kv_blocks > 100 for ready in group.ready)
            assert generate(group.step, prompts, 24) == greedy, checkpoint.name
            assert generate(group.step, prompts, 24, chunk=4) == greedy, checkpoint.name


def test_a_second_load_is_a_copy_and_gives_the_same_tokens(tmp_path: Path) -> None:
    checkpoint = DATA / "ct-gptq-actgroup-g64"
    prompts, greedy = greedy_case(checkpoint)
    cache = tmp_path / "cache"
    config = group_config(checkpoint, tp=2, weight_cache=str(cache), weight_cache_bytes=1 << 30)
    with RankGroup(config, tmp_path) as group:
        group.start()
        assert generate(group.step, prompts, 24) == greedy
    stored = {path.name: path.stat().st_ino for path in cache.glob("*/*")}
    assert sorted(stored) == ["rank-0-of-2.shard", "rank-1-of-2.shard"]
    with RankGroup(config, tmp_path) as group:
        # From the checkpoint it would tell of its loading first.
        assert all(isinstance(receive(sock), Ready) for sock in group.sockets)
        for sock in group.sockets:
            send(sock, StartCache(64))
        assert generate(group.step, prompts, 24) == greedy
    assert {path.name: path.stat().st_ino for path in cache.glob("*/*")} == stored
