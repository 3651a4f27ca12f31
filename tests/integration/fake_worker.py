"""A worker process with a fake engine: `python fake_worker.py SETTINGS.json FOLDER`.

While FOLDER/hold exists the engine makes 20 tokens a second; once FOLDER/fail does it gives up.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from batchtp.errors import RankFaultError
from batchtp.settings import load_settings
from batchtp.testing.fake_engine import FakeEngine
from batchtp.worker.app import run_worker


def obey(engine: FakeEngine, folder: Path) -> None:
    """Follow what the test puts into the folder."""
    while True:
        if (folder / "fail").exists():
            engine.fail(RankFaultError("rank 1 was killed"))
            return
        if (folder / "hold").exists():
            engine.hold()
            engine.advance(1)
        else:
            engine.release()
        time.sleep(0.05)


def main() -> None:
    """Serve model `fake` until told to stop."""
    flags, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    engine = FakeEngine()
    engine.hold()
    threading.Thread(target=obey, args=(engine, folder), daemon=True).start()
    run_worker(load_settings(flags, environ={}), engine)


if __name__ == "__main__":
    main()
