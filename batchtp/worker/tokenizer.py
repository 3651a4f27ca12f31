"""Text to token ids and back, by the checkpoint's own tokenizer and chat template. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from batchtp.errors import CheckpointError, RequestError, TokenizerError
from batchtp.model.config_gguf import gguf_eos_token_ids
from batchtp.model.config_hf import eos_token_ids, read_json_if_there, token_text
from batchtp.model.gguf import open_gguf
from batchtp.worker.chat_template import ChatTemplate
from batchtp.worker.gguf_tokenizer import adds_bos, build_tokenizer

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes; text held back for longer is not a character to come.
_MOST_HELD_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A checkpoint's tokenizer.

    `bos_id` is put before a prompt that does not start with it; None: the tokenizer decides.
    `strip_bos`: one that the tokenizer puts there is taken away.
    """

    backend: tokenizers.Tokenizer
    eos_token_ids: frozenset[int]
    template: ChatTemplate | None
    bos_id: int | None = None
    strip_bos: int | None = None

    @staticmethod
    def from_path(path: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face directory or a GGUF file.

        Raises TokenizerError when there is none that can be used, CheckpointError for a corrupt
        file.
        """
        return _from_directory(path) if path.is_dir() else _from_gguf(path)

    @property
    def vocab_size(self) -> int:
        """Tokens there are, added ones included; a model may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt's ids, with the special tokens that the tokenizer adds.

        Raises RequestError("invalid_prompt") for text that is not valid Unicode.
        """
        ids = self._encode(text, add_special_tokens=True)
        if self.strip_bos is not None and ids[:1] == [self.strip_bos]:
            return ids[1:]
        if self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation's ids by the chat template, which adds the special tokens itself.

        Raises RequestError: "no_chat_template", "chat_template_error", "invalid_prompt".
        """
        if self.template is None:
            raise RequestError(
                "no_chat_template",
                "The model has no chat template. Send a prompt to /v1/completions instead.",
                "messages",
            )
        return self._encode(self.template.render(messages), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The ids' text, special tokens left out. Bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                "invalid_prompt", f"The prompt is not valid Unicode: {error}", "prompt"
            ) from error
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


class IncrementalDecoder:
    """Decodes a growing list of ids piece by piece, holding back a character that is not whole.

    For looking at text as it comes. The final text is `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Ids since the last piece but one: a piece may depend on the token before it.
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is not whole."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[: self._shown])
        text = self._tokenizer.decode(self._ids)
        held = len(self._ids) - self._shown
        if text.endswith(_REPLACEMENT) and held < _MOST_HELD_TOKENS:
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text[len(before) :]


def _from_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{directory} has no tokenizer.json. Save the tokenizer in its fast form beside the "
            "weights."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    # The library raises nothing more special.
    except Exception as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    # A file may say to cut or pad; a prompt that is too long is refused, never cut.
    backend.no_truncation()
    backend.no_padding()
    config = read_json_if_there(directory / "tokenizer_config.json")
    special = {
        name: text for name in _SPECIAL_TOKENS if (text := token_text(config.get(name))) is not None
    }
    bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
    source = _template_source(directory, config)
    add_bos = config.get("add_bos_token")
    return Tokenizer(
        backend=backend,
        eos_token_ids=eos_token_ids(directory, read_json_if_there(directory / "config.json")),
        template=None if source is None else ChatTemplate(source, special),
        bos_id=bos if add_bos is True else None,
        strip_bos=bos if add_bos is False else None,
    )


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The file of its own goes first; of several templates, the one called default."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"Cannot read {file}: {error}") from error
    given = config.get("chat_template")
    if isinstance(given, list):
        named = (one for one in given if isinstance(one, dict) and one.get("name") == "default")
        given = next(named, {}).get("template")
    return given if isinstance(given, str) else None


def _from_gguf(path: Path) -> Tokenizer:
    file = open_gguf(path)
    backend = build_tokenizer(file)
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = file.integer(f"tokenizer.ggml.{key}_token_id")
        text = None if number is None or number < 0 else backend.id_to_token(number)
        if text is not None:
            special[f"{name}_token"] = text
    bos = file.integer("tokenizer.ggml.bos_token_id") if adds_bos(file) else None
    if bos is not None and "bos_token" not in special:
        raise TokenizerError(f"{path}: its first token's id, {bos}, is not in its vocabulary.")
    source = file.keys.get("tokenizer.chat_template")
    return Tokenizer(
        backend=backend,
        eos_token_ids=gguf_eos_token_ids(file),
        template=ChatTemplate(source, special) if isinstance(source, str) else None,
        bos_id=bos,
    )
