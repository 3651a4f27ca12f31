"""The bootstrap: what it says when the machine lacks something, and when it does nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batchtp import bootstrap
from batchtp.bootstrap import BootstrapError


def test_missing_venv_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bootstrap.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object
    )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(BootstrapError, match=f"apt-get install python{version}-venv"):
        bootstrap.need_venv()


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "OLDEST_PYTHON", (99, 0))
    with pytest.raises(BootstrapError, match=r"Python 3\.11 or newer is needed"):
        bootstrap.check_machine()


def test_a_failed_step_shows_the_end_of_its_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("an earlier run\n")
    code = "import sys; print('no such package'); sys.exit(3)"
    with pytest.raises(BootstrapError, match=r"(?s)Doing it failed.*no such package") as caught:
        bootstrap.step("Doing it", [sys.executable, "-c", code], log)
    assert "an earlier run" not in str(caught.value)


def test_nothing_is_installed_when_the_stamp_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installs: list[bool] = []
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", "/usr")

    def install(environment: Path, python: Path, testing: bool) -> None:
        installs.append(testing)
        python.parent.mkdir(exist_ok=True)
        python.touch()

    monkeypatch.setattr(bootstrap, "install", install)
    for testing in (False, False, True, True, False):
        assert bootstrap.ensure_environment(testing) == tmp_path / "bin" / "python"
    assert installs == [False, True]
    monkeypatch.setattr(bootstrap, "DEMO_MODEL", "another==1")
    bootstrap.ensure_environment(False)
    assert installs == [False, True, False]


def test_a_missing_home_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap.pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.delenv("HOME")
    bootstrap.repair_home()
    assert Path(bootstrap.os.environ["HOME"]) == tmp_path / ".venv" / "home"


def test_every_check_runs_also_after_one_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bootstrap, "CHECKS", (("first", ["-c", "import sys; sys.exit(1)"]), ("second", ["-c", ""]))
    )
    assert bootstrap.run_checks(Path(sys.executable), ["--version"]) == 1
    said = capsys.readouterr().err
    assert "== second" in said
    assert "Failed: first." in said
