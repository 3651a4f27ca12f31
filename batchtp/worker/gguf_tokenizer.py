"""A tokenizer from a GGUF file's keys: byte-level BPE, with the family's way of splitting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from batchtp.errors import TokenizerError
from batchtp.model.gguf import GgufFile

_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_SMOLLM = ("smollm",)
_GPT2 = ("gpt-2", "default")
# llama.cpp's token types.
_CONTROL, _USER_DEFINED = 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The file's tokenizer, without a post-processor: see adds_bos.

    Raises TokenizerError for a kind that is not built here, or malformed keys.
    """
    keys = file.keys
    kind, split = keys.get("tokenizer.ggml.model"), keys.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise TokenizerError(
            f"{file.path}: tokenizer model {kind!r} is not supported; only gpt2 (byte-level BPE) "
            "is. Use the model's safetensors directory."
        )
    tokens, merges = _strings(file, "tokens"), _strings(file, "merges")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise TokenizerError(f"{file.path}: its tokenizer has the same token twice.")
    pairs = [_pair(merge, vocabulary, file) for merge in merges]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=split in _LLAMA3))
    if split in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitter(split, file)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, tokens, file)
    return tokenizer


def adds_bos(file: GgufFile) -> bool:
    """Whether a prompt starts with the beginning-of-sequence token."""
    by_default = file.keys.get("tokenizer.ggml.pre") in _LLAMA3
    return bool(file.keys.get("tokenizer.ggml.add_bos_token", by_default))


def _strings(file: GgufFile, name: str) -> Sequence[str]:
    values = file.keys.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TokenizerError(f"{file.path} has no list of tokenizer.ggml.{name}.")
    return values


def _pair(merge: str, vocabulary: Mapping[str, int], file: GgufFile) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise TokenizerError(f"{file.path}: its tokenizer's merge {merge!r} is not of its tokens.")
    return left, right


def _splitter(name: str, file: GgufFile) -> PreTokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in _GPT2 + _SMOLLM)
    if name in _GPT2:
        return level
    if name in _SMOLLM:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    if name in _LLAMA3 + _QWEN2:
        # Numbers come in threes for Llama 3, digit by digit for Qwen 2.
        numbers = r"\p{N}{1,3}" if name in _LLAMA3 else r"\p{N}"
        words = pre_tokenizers.Split(Regex(_WORDS % numbers), "isolated")
        return pre_tokenizers.Sequence([words, level])
    raise TokenizerError(
        f"{file.path}: tokenizer splitting {name!r} is not supported; "
        f"{', '.join(_GPT2 + _SMOLLM + _LLAMA3 + _QWEN2)} are. Use the model's safetensors "
        "directory."
    )


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], file: GgufFile) -> None:
    kinds = file.keys.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list):
        raise TokenizerError(f"{file.path}: tokenizer.ggml.token_type is not a list.")
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
