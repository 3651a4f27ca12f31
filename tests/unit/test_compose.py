"""The container files say what the code says: settings, commands, deadlines, paths."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchtp.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
PASSWORDS = {"VALKEY_PASSWORD": "v1", "POSTGRES_PASSWORD": "p2"}


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())


def interpolated(text: str) -> str:
    """The text with `${NAME:?message}` and `${NAME:-default}` filled in, as Compose does."""
    text = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda m: PASSWORDS[m[1]], text)
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_compose_environment_is_valid_settings() -> None:
    for service in ("worker", "migrate"):
        environment = compose()["services"][service]["environment"]
        settings = load_settings(environ={k: interpolated(v) for k, v in environment.items()})
        assert settings.redis_url == "redis://:v1@valkey:6379/0"
        assert settings.database_url == "postgresql+psycopg://batchtp:p2@postgres:5432/batchtp"


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_no_variable_of_compose_is_taken_for_a_setting(name: str) -> None:
    # .env goes to Compose and to the worker, which refuses a BATCHTP_ name it does not know.
    used = re.findall(r"\$\{(\w+)", (ROOT / name).read_text())
    assert used
    assert not [variable for variable in used if variable.startswith("BATCHTP_")]


def test_passwords_are_required_and_have_no_default() -> None:
    for reference in re.findall(r"\$\{\w*PASSWORD[^}]*\}", (ROOT / "compose.yaml").read_text()):
        assert re.fullmatch(r"\$\{\w+:\?.+\}", reference)


def test_worker_is_stopped_after_its_own_grace_time() -> None:
    period = compose()["services"]["worker"]["stop_grace_period"]
    assert float(period.removesuffix("s")) > Settings().grace_secs + 10


def test_worker_starts_after_the_schema_and_healthy_services() -> None:
    services = compose()["services"]
    waits = {k: v["condition"] for k, v in services["worker"]["depends_on"].items()}
    assert waits == {
        "valkey": "service_healthy",
        "postgres": "service_healthy",
        "migrate": "service_completed_successfully",
    }
    for name in ("valkey", "postgres"):
        assert services[name]["healthcheck"]["test"]


def test_gpu_file_overrides_services_there_are() -> None:
    assert set(compose("compose.gpu.yaml")["services"]) <= set(compose()["services"])


def test_image_is_built_from_files_there_are_and_runs_as_a_user() -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert [path for path in allowed if not (ROOT / path).exists()] == []
    final = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (\w+)$", final, re.MULTILINE) == ["batchtp"]


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]])
def test_docker_compose_accepts_the_files(files: list[str]) -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("needs docker compose")
    names = [part for file in files for part in ("--file", str(ROOT / file))]
    command = [docker, "compose", "--env-file", "/dev/null", *names, "config", "--quiet"]
    bare = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    checked = subprocess.run(
        command, env=bare | PASSWORDS, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    refused = subprocess.run(command, env=bare, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "PASSWORD" in refused.stderr
