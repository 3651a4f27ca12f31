"""What pyproject.toml cannot say: a wheel carries the migrations inside the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithMigrations(build_py):
    """build_py that copies `migrations/` to `batchtp/migrations/`, where store.migrate looks."""

    def run(self) -> None:
        """Build, then copy. An editable install finds them beside the package."""
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                "migrations",
                Path(self.build_lib) / "batchtp" / "migrations",
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )


setup(cmdclass={"build_py": BuildWithMigrations})
