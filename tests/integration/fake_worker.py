"""A worker process with a fake engine: `python fake_worker.py SETTINGS.json [--hold]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from batchtp.settings import load_settings
from batchtp.testing.fake_engine import FakeEngine
from batchtp.worker.app import run_worker


def main() -> None:
    """Serve model `fake` until told to stop; with --hold, answer nothing."""
    flags = json.loads(Path(sys.argv[1]).read_text())
    engine = FakeEngine()
    if "--hold" in sys.argv:
        engine.hold()
    run_worker(load_settings(flags, environ={}), engine)


if __name__ == "__main__":
    main()
