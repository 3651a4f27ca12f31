"""Settings: precedence, refusals, masking."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchtp.errors import SettingsError
from batchtp.settings import load_settings, mask_url

URLS = {
    "BATCHTP_REDIS_URL": "redis://:secret@r:6379/0",
    "BATCHTP_DATABASE_URL": "postgresql+psycopg://me:secret@p/db",
}


def load(tmp_path: Path, flags: dict[str, object] | None = None, **environ: str):
    return load_settings({"home": str(tmp_path), **(flags or {})}, environ)


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("tp = 2\nmax_sequences = 3\nblock_size = 4\n")
    environ = {"BATCHTP_TP": "5", "BATCHTP_MAX_SEQUENCES": "6"}
    settings = load(tmp_path, {"tp": 7}, **environ)
    assert (settings.tp, settings.max_sequences, settings.block_size) == (7, 6, 4)
    assert settings.sources["tp"] == "flag"
    assert settings.sources["max_sequences"] == "environment BATCHTP_MAX_SEQUENCES"
    assert settings.sources["block_size"] == f"file {tmp_path / 'config.toml'}"
    assert settings.sources["max_restarts"] == "default"


def test_a_flag_that_is_none_is_not_given(tmp_path: Path) -> None:
    assert load(tmp_path, {"tp": None}, BATCHTP_TP="5").tp == 5


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"BATCHTP_TPP": "2"}, "Unknown setting BATCHTP_TPP in the environment"),
        ({"BATCHTP_TP": "two"}, "'two' is not a int"),
        ({"BATCHTP_TP": "0"}, "below the least value, 1"),
        ({"BATCHTP_TP": "65"}, "above the greatest value, 64"),
        ({"BATCHTP_DEVICE": "tpu"}, "not one of auto, cpu, cuda"),
        ({"BATCHTP_CHUNKED_PREFILL": "maybe"}, "is not a bool"),
        ({"BATCHTP_LEASE_SECS": "2"}, "at most a third of lease_secs"),
        ({"BATCHTP_LEASE_SECS": "200"}, "must be above lease_secs"),
        ({"BATCHTP_REDIS_URL": "redis://r"}, "Set both"),
        ({"BATCHTP_CONFIG": "/nowhere/at/all.toml"}, "does not exist"),
    ],
)
def test_bad_values_are_refused_by_name(
    tmp_path: Path, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load(tmp_path, **environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [("tpp = 2", "Unknown setting tpp"), ("tp = ", "Cannot read"), ("tp = true", "is not a int")],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        load(tmp_path)


def test_passwords_are_masked(tmp_path: Path) -> None:
    settings = load(tmp_path, **URLS)
    assert "secret" not in settings.shown("redis_url") + settings.shown("database_url")
    assert settings.shown("database_url") == "postgresql+psycopg://me:***@p/db"
    assert mask_url("redis://host/0") == "redis://host/0"


def test_home_is_absolute_and_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert load_settings(environ={}).home_path == tmp_path / "batchtp"
