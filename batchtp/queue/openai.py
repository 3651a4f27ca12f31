"""Lines of a prompts file: OpenAI batch lines, short lines, plain text. And output lines back.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}
    {"messages": […], "max_tokens": 20}      {"prompt": "…", "id": "b"}      plain text (text=True)

A parameter that batchtp does not know, or does not do, is an error of that line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchtp.core import Endpoint, GenerationRequest, RequestKey, SamplingParams
from batchtp.errors import RequestError

_MOST_TOKENS = 2**31 - 1
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ENVELOPE = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """A good line. `payload` is {"url", "body"}: what the worker parses again.

    `custom_id` is the line's own or `request-<line>`. The request's key names no batch yet.
    """

    custom_id: str
    payload: Mapping[str, Any]
    request: GenerationRequest


def parse_line(raw: bytes, line: int, *, model: str, text: bool = False) -> ParsedLine:
    """Check one line of a file (one-based `line`). Raises RequestError with a code and a field."""
    if text:
        document: Any = {"prompt": _decode(raw)}
    else:
        document = _json(raw)
    return parse_document(document, line, model=model)


def parse_document(document: Any, line: int, *, model: str) -> ParsedLine:
    """The same for a line that is JSON already."""
    if isinstance(document, str):
        document = {"prompt": document}
    if not isinstance(document, dict):
        raise RequestError("invalid_request", "The line is not a JSON object.")
    custom_id, url, body = _unwrap(document, line)
    _check_model(body, model)
    return ParsedLine(
        custom_id=custom_id,
        payload={"url": url.value, "body": body},
        request=parse_body(RequestKey("", line - 1), custom_id, url, body),
    )


def custom_id_of(raw: bytes | Mapping[str, Any], line: int) -> str:
    """The custom_id of a line that may be bad in other ways, for its error row."""
    try:
        document = json.loads(raw) if isinstance(raw, bytes) else dict(raw)
    except (ValueError, RecursionError):
        return f"request-{line}"
    found = document.get("custom_id", document.get("id")) if isinstance(document, dict) else None
    return found if isinstance(found, str) and found else f"request-{line}"


def parse_body(
    key: RequestKey, custom_id: str, url: Endpoint, body: Mapping[str, Any]
) -> GenerationRequest:
    """A request body as the engine takes it. Raises RequestError."""
    body = {name: value for name, value in body.items() if value is not None}
    prompt_field = "messages" if url is Endpoint.CHAT else "prompt"
    known = set(_READERS) | set(_FIXED) | _IGNORED | {prompt_field}
    for name in body:
        if name not in known:
            raise RequestError("unknown_parameter", f"{name!r} is not supported.", str(name))
    for name, allowed in _FIXED.items():
        if name in body and not _is_same(body[name], allowed):
            raise RequestError("unsupported_value", f"{name} can only be {allowed!r} here.", name)
    if prompt_field not in body:
        raise RequestError("missing_field", f"{prompt_field} is missing.", prompt_field)
    values: dict[str, Any] = {}
    for name, (target, read) in _READERS.items():
        if name in body:
            if target in values:
                raise RequestError("invalid_value", f"{name} is given twice.", name)
            values[target] = read(name, body[name])
    return GenerationRequest(
        key=key,
        custom_id=custom_id,
        endpoint=url,
        sampling=SamplingParams(**values),
        messages=_messages(body["messages"]) if url is Endpoint.CHAT else None,
        prompt=_prompt(body["prompt"]) if url is Endpoint.COMPLETION else None,
    )


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("invalid_encoding", f"The line is not UTF-8: {error.reason}.") from None


def _json(raw: bytes) -> Any:
    text = _decode(raw)
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise RequestError("invalid_json_line", "The JSON is nested too deeply.") from None
    except ValueError as error:
        raise RequestError("invalid_json_line", f"The line is not valid JSON: {error}.") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice in one object")
    return found


def _unwrap(document: dict[str, Any], line: int) -> tuple[str, Endpoint, dict[str, Any]]:
    if "body" in document or "url" in document:
        return _unwrap_openai(document)
    body = dict(document)
    custom_id = body.pop("custom_id", None)
    custom_id = body.pop("id", None) if custom_id is None else custom_id
    if custom_id is None:
        custom_id = f"request-{line}"
    chat, completion = "messages" in body, "prompt" in body
    if chat == completion:
        raise RequestError("missing_field", "The line needs either messages or prompt.", "prompt")
    return _custom_id(custom_id), Endpoint.CHAT if chat else Endpoint.COMPLETION, body


def _unwrap_openai(document: dict[str, Any]) -> tuple[str, Endpoint, dict[str, Any]]:
    for name in document:
        if name not in _ENVELOPE:
            raise RequestError("unknown_parameter", f"{name!r} is not a field of a line.", name)
    for name in ("custom_id", "url", "body"):
        if document.get(name) is None:
            raise RequestError("missing_field", f"{name} is missing.", name)
    if document.get("method", "POST") != "POST":
        raise RequestError("invalid_value", "method can only be 'POST'.", "method")
    try:
        url = Endpoint(document["url"])
    except ValueError:
        raise RequestError(
            "url_mismatch",
            f"{document['url']!r} is not served; use {' or '.join(Endpoint)}.",
            "url",
        ) from None
    if not isinstance(document["body"], dict):
        raise RequestError("invalid_value", "body is not an object.", "body")
    return _custom_id(document["custom_id"]), url, document["body"]


def _custom_id(value: Any) -> str:
    if not isinstance(value, str) or not value or len(value) > 512:
        raise RequestError(
            "invalid_value", "custom_id must be a string of 1 to 512 characters.", "custom_id"
        )
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
        raise RequestError(
            "invalid_value", "custom_id holds NUL or half a surrogate pair.", "custom_id"
        )
    return value


def _check_model(body: Mapping[str, Any], model: str) -> None:
    wanted = body.get("model")
    if wanted is not None and wanted != model:
        raise RequestError(
            "model_mismatch",
            f"The line asks for model {wanted!r}, the batch is for {model!r}.",
            "model",
        )


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise RequestError("invalid_value", "messages must be a non-empty list.", "messages")
    for at, message in enumerate(value):
        where = f"messages[{at}]"
        if not isinstance(message, dict):
            raise RequestError("invalid_value", f"{where} is not an object.", where)
        if message.get("role") not in _ROLES:
            raise RequestError(
                "invalid_value", f"{where}.role must be one of {', '.join(_ROLES)}.", where
            )
        if not isinstance(message.get("content"), str):
            raise RequestError("invalid_value", f"{where}.content must be a string.", where)
    return tuple(value)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise RequestError("empty_prompt", "The prompt is empty.", "prompt")
        return value
    if isinstance(value, list) and all(_is_token_id(token) for token in value):
        if not value:
            raise RequestError("empty_prompt", "The prompt is empty.", "prompt")
        return tuple(value)
    raise RequestError(
        "invalid_value", "prompt must be one string or one list of token ids.", "prompt"
    )


def _is_same(value: Any, allowed: int | bool) -> bool:
    """Equal, and true is not 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_id(value: Any) -> bool:
    return _is_int(value) and 0 <= value <= _MOST_TOKENS


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if not _is_int(value) or not low <= value <= high:
            raise RequestError(
                "invalid_value", f"{name} must be a whole number from {low} to {high}.", name
            )
        return int(value)

    return read


def _number(low: float, high: float, *, above: bool = False) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not low <= value <= high or (above and value == low):
            between = f"above {low:g} and up to" if above else f"from {low:g} to"
            raise RequestError("invalid_value", f"{name} must be {between} {high:g}.", name)
        return float(value)

    return read


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError("invalid_value", f"{name} must be true or false.", name)
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise RequestError(
            "invalid_value", f"{name} must be a string or a list of non-empty strings.", name
        )
    return tuple(values)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_token_id(v) for v in value):
        raise RequestError("invalid_value", f"{name} must be a list of token ids.", name)
    return tuple(value)


_Reader = Callable[[str, Any], Any]
_READERS: dict[str, tuple[str, _Reader]] = {
    "max_tokens": ("max_tokens", _integer(1, _MOST_TOKENS)),
    "max_completion_tokens": ("max_tokens", _integer(1, _MOST_TOKENS)),
    "temperature": ("temperature", _number(0, 100)),
    "top_p": ("top_p", _number(0, 1, above=True)),
    "top_k": ("top_k", _integer(0, _MOST_TOKENS)),
    "seed": ("seed", _integer(-(2**63), 2**63 - 1)),
    "stop": ("stop", _strings),
    "stop_token_ids": ("stop_token_ids", _ids),
    "ignore_eos": ("ignore_eos", _flag),
}
# Parameters that may be there as long as they ask for nothing.
_FIXED: dict[str, int | bool] = {
    "n": 1,
    "stream": False,
    "logprobs": False,
    "echo": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
# Say nothing about the text that is wanted.
_IGNORED = {"model", "user", "metadata"}
