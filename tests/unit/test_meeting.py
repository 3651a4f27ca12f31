"""A group's folder is its own, and what a killed owner left goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from batchtp.worker.meeting import MeetingPlace


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def aged(folder: Path) -> Path:
    os.utime(folder, (1, 1))
    return folder


def test_a_folder_is_fresh_and_goes_with_its_owner(temporary: Path) -> None:
    first, second = MeetingPlace(), MeetingPlace()
    assert first.rendezvous != second.rendezvous
    Path(first.rendezvous).write_text("x")
    first.close()
    first.close()
    assert [str(path) for path in temporary.iterdir()] == [str(Path(second.rendezvous).parent)]
    second.close()
    assert not list(temporary.iterdir())


def test_only_abandoned_folders_are_removed(temporary: Path) -> None:
    held = MeetingPlace()
    aged(Path(held.rendezvous).parent)
    abandoned = temporary / "batchtp-group-dead"
    abandoned.mkdir()
    (abandoned / "rendezvous").touch()
    aged(abandoned)
    unclaimed = temporary / "batchtp-group-new"
    unclaimed.mkdir()
    target = temporary / "precious"
    target.mkdir()
    link = temporary / "batchtp-group-link"
    link.symlink_to(target)
    os.utime(link, (1, 1), follow_symlinks=False)
    MeetingPlace().close()
    assert target.is_dir()
    assert link.is_symlink()
    assert not abandoned.exists()
    assert unclaimed.is_dir()
    assert Path(held.rendezvous).parent.is_dir()
    held.close()
