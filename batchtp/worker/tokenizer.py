"""Text to tokens and back, with the tokenizer and chat template that came with the checkpoint.

No torch and so no transformers: tokenizer.json is read by `tokenizers`, and a GGUF file's
vocabulary is made into the same thing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from batchtp.errors import CheckpointError, RequestError, TokenizerError
from batchtp.model.config import load_config
from batchtp.model.gguf import open_gguf
from batchtp.worker.chat_template import ChatTemplate

_REPLACEMENT = "\ufffd"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
# Token kinds in a GGUF vocabulary.
_CONTROL, _USER_DEFINED = 3, 4

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A checkpoint's tokenizer. `eos_token_ids`: all ids that end a text. Threads may share it."""

    def __init__(
        self,
        backend: Backend,
        template: ChatTemplate | None,
        eos_token_ids: frozenset[int],
        *,
        bos: int | None = None,
    ) -> None:
        """`bos`: put before every plain prompt, where the backend does not do so itself."""
        self._backend = backend
        self._template = template
        self._bos = [] if bos is None else [bos]
        self.eos_token_ids = eos_token_ids

    @staticmethod
    def from_path(path: Path) -> Tokenizer:
        """The tokenizer of a directory or a GGUF file. Raises TokenizerError, CheckpointError."""
        return _from_gguf(path) if path.is_file() else _from_directory(path)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows; the model's vocabulary may be padded beyond."""
        return self._backend.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return self._template is not None

    def encode_prompt(self, text: str) -> list[int]:
        """A plain prompt's ids, with what the model wants at its start."""
        return self._bos + self._encode(text, special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation up to where the answer begins. Raises RequestError."""
        if self._template is None:
            raise RequestError(
                "no_chat_template",
                "The model has no chat template: send a prompt to /v1/completions instead.",
                "messages",
            )
        # The template writes every special token itself.
        return self._encode(self._template.render(messages), special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out. Bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            return list(self._backend.encode(text, add_special_tokens=special).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "invalid_prompt", f"The text cannot be encoded: {error}", "prompt"
            ) from error


class IncrementalDecoder:
    """Text as it grows token by token; never half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # What is decoded anew each time starts here: some decoders look at the token before.
        self._context = 0
        self._told = 0

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is not whole."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._context : self._told])
        now = self._tokenizer.decode(self._ids[self._context :])
        if now.endswith(_REPLACEMENT) or len(now) <= len(before):
            return ""
        self._context, self._told = self._told, len(self._ids)
        return now[len(before) :]


def _from_directory(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{path} has no tokenizer.json; other tokenizer files are not read.")
    try:
        backend = Backend.from_file(str(file))
    # The library raises plain Exception for a file it cannot read.
    except Exception as error:
        raise TokenizerError(f"{file} is not a tokenizer: {error}") from error
    config = _json(path / "tokenizer_config.json")
    tokens = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
    source = _template_source(path, config)
    template = ChatTemplate(source, tokens) if source else None
    return Tokenizer(backend, template, load_config(path).eos_token_ids)


def _json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"Cannot read {file}: {error}") from error
    return found if isinstance(found, dict) else {}


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _template_source(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default")
    if found is None:
        found = _json(path / "chat_template.json").get("chat_template")
    return found if isinstance(found, str) else None


def _from_gguf(path: Path) -> Tokenizer:
    keys = open_gguf(path).keys

    def key(name: str, default: Any = None) -> Any:
        return keys.get(f"tokenizer.ggml.{name}", default)

    if key("model") != "gpt2":
        raise TokenizerError(
            f"{path}: tokenizer model {key('model')!r} is not read from GGUF files, only gpt2 "
            "(byte-level BPE). Use the checkpoint's Hugging Face directory."
        )
    tokens, kinds = key("tokens"), key("token_type")
    if not tokens or not kinds or len(tokens) != len(kinds):
        raise CheckpointError(f"{path} has no complete vocabulary.")
    backend = Backend(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[_pair(path, merge) for merge in key("merges", [])],
            fuse_unk=False,
            ignore_merges=key("pre") == "llama-bpe",
        )
    )
    backend.pre_tokenizer = _pre_tokenizer(path, key("pre", "default"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [_added(token) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    backend.add_tokens(
        [_added(token) for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    )
    texts = {}
    for name, stored in zip(_SPECIAL_NAMES, ("bos", "eos", "unknown", "padding"), strict=True):
        number = key(f"{stored}_token_id")
        if number is not None:
            texts[name] = tokens[number]
    source = keys.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        ChatTemplate(source, texts) if source else None,
        load_config(path).eos_token_ids,
        bos=key("bos_token_id") if key("add_bos_token", False) else None,
    )


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise CheckpointError(f"{path}: {merge!r} is no merge of two tokens.")
    return left, right


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _pre_tokenizer(path: Path, name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging: llama.cpp's name for it."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return plain
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    digits = {"llama-bpe": 3, "llama3": 3, "qwen2": 1}.get(name)
    if digits is None:
        raise TokenizerError(
            f"{path}: pre-tokenizer {name!r} is not read from GGUF files. Use the checkpoint's "
            "Hugging Face directory."
        )
    split = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
