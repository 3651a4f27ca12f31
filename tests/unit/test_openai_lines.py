"""Lines of a prompts file, good and bad; what leaves through the wire comes back as it was."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtp.core import Endpoint, Failure, SamplingParams
from batchtp.errors import InputError, RequestError
from batchtp.queue import wire
from batchtp.queue.lines import LineChecker, Source
from batchtp.queue.openai import custom_id_of, parse_document, parse_line
from batchtp.store.intake import BatchHead, IncomingRequest

MODEL = "m"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def line(body: Any = None, **changes: Any) -> dict[str, Any]:
    whole = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": CHAT if body is None else body,
        **changes,
    }
    return {name: value for name, value in whole.items() if value is not ...}


def rows(source: Source, *, text: bool = False, longest: int = 1000) -> list[IncomingRequest]:
    return list(LineChecker(MODEL, text=text, max_line_bytes=longest).rows(source))


def codes(source: Iterable[bytes], folder: Path, **options: Any) -> list[tuple[int, str | None]]:
    """(line number, error code) of each row of a file."""
    path = folder / "f.jsonl"
    path.write_bytes(b"".join(source))
    return [(r.line, r.failure.code if r.failure else None) for r in rows(path, **options)]


def test_an_openai_line_becomes_a_request() -> None:
    body = {
        **CHAT,
        "model": MODEL,
        "max_completion_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "seed": -7,
        "stop": "x",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "n": 1,
        "stream": False,
        "user": "u",
        "metadata": {"k": "v"},
        "logprobs": None,
    }
    parsed = parse_line(json.dumps(line(body)).encode(), 9, model=MODEL)
    assert parsed.custom_id == "a"
    assert parsed.payload == {"url": Endpoint.CHAT, "body": body}
    assert parsed.request.endpoint is Endpoint.CHAT
    assert parsed.request.messages == tuple(CHAT["messages"])
    assert parsed.request.prompt is None
    assert parsed.request.key.index == 8
    assert parsed.request.sampling == SamplingParams(5, 0.0, 0.5, 4, -7, ("x",), (3,), True)


@pytest.mark.parametrize(
    ("document", "custom_id", "endpoint", "prompt"),
    [
        ({"prompt": "p"}, "request-4", Endpoint.COMPLETION, "p"),
        ({"prompt": [1, 2], "id": "b"}, "b", Endpoint.COMPLETION, (1, 2)),
        ({**CHAT, "custom_id": "c"}, "c", Endpoint.CHAT, None),
        ("p", "request-4", Endpoint.COMPLETION, "p"),
        (
            line({"prompt": "p"}, url="/v1/completions", method=...),
            "a",
            Endpoint.COMPLETION,
            "p",
        ),
    ],
)
def test_short_forms(document: Any, custom_id: str, endpoint: Endpoint, prompt: Any) -> None:
    parsed = parse_document(document, 4, model=MODEL)
    assert (parsed.custom_id, parsed.request.endpoint) == (custom_id, endpoint)
    assert parsed.request.prompt == prompt
    assert parsed.request.sampling == SamplingParams()


@pytest.mark.parametrize(
    ("document", "code", "param"),
    [
        ([], "invalid_request", None),
        (line(custom_id=...), "missing_field", "custom_id"),
        (line(custom_id=7), "invalid_value", "custom_id"),
        (line(custom_id=""), "invalid_value", "custom_id"),
        (line(custom_id="x" * 513), "invalid_value", "custom_id"),
        (line(custom_id="a\x00"), "invalid_value", "custom_id"),
        (line(custom_id="\ud800"), "invalid_value", "custom_id"),
        (line(url=...), "missing_field", "url"),
        (line(url="/v1/embeddings"), "url_mismatch", "url"),
        (line(url=["/v1/completions"]), "url_mismatch", "url"),
        (line(method="GET"), "invalid_value", "method"),
        (line(body="x"), "invalid_value", "body"),
        (line(extra=1), "unknown_parameter", "extra"),
        (line({**CHAT, "model": "other"}), "model_mismatch", "model"),
        (line({**CHAT, "tools": []}), "unknown_parameter", "tools"),
        (line({**CHAT, "prompt": "p"}), "unknown_parameter", "prompt"),
        (line({}), "missing_field", "messages"),
        (line({"messages": []}), "invalid_value", "messages"),
        (line({"messages": ["hi"]}), "invalid_value", "messages[0]"),
        (line({"messages": [{"role": "alien", "content": ""}]}), "invalid_value", "messages[0]"),
        (line({"messages": [{"role": "user", "content": 1}]}), "invalid_value", "messages[0]"),
        (line({**CHAT, "n": 2}), "unsupported_value", "n"),
        (line({**CHAT, "n": True}), "unsupported_value", "n"),
        (line({**CHAT, "stream": True}), "unsupported_value", "stream"),
        (line({**CHAT, "stream": 0}), "unsupported_value", "stream"),
        (line({**CHAT, "max_tokens": 0}), "invalid_value", "max_tokens"),
        (line({**CHAT, "max_tokens": True}), "invalid_value", "max_tokens"),
        (line({**CHAT, "max_tokens": 1.5}), "invalid_value", "max_tokens"),
        (line({**CHAT, "max_tokens": 2**40}), "invalid_value", "max_tokens"),
        (
            line({**CHAT, "max_tokens": 1, "max_completion_tokens": 1}),
            "invalid_value",
            "max_completion_tokens",
        ),
        (line({**CHAT, "temperature": -1}), "invalid_value", "temperature"),
        (line({**CHAT, "temperature": "0"}), "invalid_value", "temperature"),
        (line({**CHAT, "temperature": 10**400}), "invalid_value", "temperature"),
        (line({**CHAT, "temperature": float("nan")}), "invalid_value", "temperature"),
        (line({**CHAT, "top_p": 0}), "invalid_value", "top_p"),
        (line({**CHAT, "top_p": 1.1}), "invalid_value", "top_p"),
        (line({**CHAT, "top_k": -1}), "invalid_value", "top_k"),
        (line({**CHAT, "seed": 2**63}), "invalid_value", "seed"),
        (line({**CHAT, "stop": [""]}), "invalid_value", "stop"),
        (line({**CHAT, "stop": [1]}), "invalid_value", "stop"),
        (line({**CHAT, "stop_token_ids": [-1]}), "invalid_value", "stop_token_ids"),
        (line({**CHAT, "ignore_eos": 1}), "invalid_value", "ignore_eos"),
        ({"prompt": ""}, "empty_prompt", "prompt"),
        ({"prompt": "   "}, "empty_prompt", "prompt"),
        ({"prompt": []}, "empty_prompt", "prompt"),
        ({"prompt": ["a", "b"]}, "invalid_value", "prompt"),
        ({"prompt": [1, -1]}, "invalid_value", "prompt"),
        ({"prompt": [2**31]}, "invalid_value", "prompt"),
        ({"prompt": [True]}, "invalid_value", "prompt"),
        ({"max_tokens": 4}, "missing_field", "prompt"),
        ({"prompt": "p", **CHAT}, "missing_field", "prompt"),
        ({("a", 1): 2, "prompt": "p"}, "unknown_parameter", "('a', 1)"),
    ],
)
def test_a_bad_line_names_its_field(document: Any, code: str, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse_document(document, 1, model=MODEL)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.message


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"nothing", "invalid_json_line"),
        (b'{"prompt": "p", "temperature": NaN}', "invalid_json_line"),
        (b'{"prompt": "p", "temperature": 1e999}', "invalid_value"),
        (b'{"prompt": "a", "prompt": "b"}', "invalid_json_line"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b'{"prompt": "\xff"}', "invalid_encoding"),
        (b"7", "invalid_request"),
    ],
)
def test_what_is_no_json_object(raw: bytes, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_line(raw, 1, model=MODEL)
    assert caught.value.code == code


def test_bom_crlf_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    source = [b'\xef\xbb\xbf{"prompt": "a"}\r\n', b"\r\n", b" \t\n", b'{"prompt": "\xc3\xa9"}']
    assert codes(source, tmp_path) == [(1, None), (4, None)]


def test_every_bad_line_is_a_row_with_its_number_and_the_good_ones_stay(tmp_path: Path) -> None:
    source = [b'{"prompt": "a", "id": "x"}\n', b"no\n", b'{"prompt": "b", "id": "x"}\n', b"{}\n"]
    found = codes(source, tmp_path)
    assert found == [
        (1, None),
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "missing_field"),
    ]
    third = rows(tmp_path / "f.jsonl")[2]
    assert third.custom_id == "x"
    assert third.failure is not None
    assert "line 1" in third.failure.message


def test_a_given_id_may_not_be_one_that_was_made_up(tmp_path: Path) -> None:
    source = [b'{"prompt": "a"}\n', b'{"prompt": "b", "id": "request-1"}\n']
    assert codes(source, tmp_path) == [(1, None), (2, "duplicate_custom_id")]


def test_a_line_over_the_limit_is_cut_and_told(tmp_path: Path) -> None:
    longest = 100
    source = [
        b'{"prompt": "' + b"a" * 84 + b'"}\r\n',
        b'{"prompt": "' + b"a" * 3_000_000 + b'"}\n',
        b'{"prompt": "b"}\n',
    ]
    assert codes(source, tmp_path, longest=longest) == [
        (1, None),
        (2, "line_too_long"),
        (3, None),
    ]


def test_text_lines_are_prompts_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    path.write_bytes(b'{"prompt": 1}\n\n  two \n\xff\n')
    found = rows(path, text=True)
    assert [json.loads(r.payload)["body"]["prompt"] for r in found[:2] if r.payload] == [
        '{"prompt": 1}',
        "  two ",
    ]
    assert found[2].failure is not None
    assert (found[2].failure.code, found[2].custom_id) == ("invalid_encoding", "request-4")


def test_gzip_files_and_what_cannot_be_read(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"prompt": "a"}\n' * 200)
    (tmp_path / "a.gz").write_bytes(whole)
    assert len(rows(tmp_path / "a.gz")) == 200
    (tmp_path / "cut.gz").write_bytes(whole[:-12])
    for bad in ("cut.gz", "none.jsonl", "."):
        with pytest.raises(InputError, match="Cannot read") as caught:
            rows(tmp_path / bad)
        assert caught.value.code == "unreadable_file"


def test_requests_from_python() -> None:
    found = rows(["plain", {"prompt": "p", "id": "x"}, {"prompt": {1, 2}}, {3: 4}])
    assert [r.failure.code if r.failure else None for r in found] == [
        None,
        None,
        "invalid_value",
        "missing_field",
    ]
    with pytest.raises(InputError, match="Item 1 is a int"):
        rows([7])  # type: ignore[list-item]


def test_what_cannot_be_json_fails_by_itself() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    found = rows([{"prompt": "p", "metadata": deep}, {"prompt": "p", "metadata": {1, 2}}, "fine"])
    assert [r.failure.code if r.failure else None for r in found] == [
        "invalid_request",
        "invalid_request",
        None,
    ]


def test_nul_and_half_surrogate_pairs_travel_as_ascii() -> None:
    (row,) = rows([{"prompt": "a\x00\ud83d"}])
    assert row.payload is not None
    assert row.payload.isascii()
    assert json.loads(row.payload)["body"]["prompt"] == "a\x00\ud83d"
    (unpacked,), _ = wire.unpack(wire.pack([row])[0])
    assert unpacked == row


def test_custom_id_of_a_line_that_is_bad_otherwise() -> None:
    assert custom_id_of(b'{"custom_id": "x", "url": 1}', 3) == "x"
    assert custom_id_of(b'{"id": "y"}', 3) == "y"
    for raw in (b"{", b"[1]", b'{"id": 5}', b"[" * 100_000):
        assert custom_id_of(raw, 3) == "request-3"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(_JSON | st.fixed_dictionaries({"prompt": _JSON}, optional={"stop": _JSON, "id": _JSON}))
def test_whatever_json_comes_there_is_a_request_or_a_reason(document: Any) -> None:
    with contextlib.suppress(RequestError):
        parse_line(json.dumps(document).encode(), 1, model=MODEL)


@given(st.binary(max_size=60))
def test_whatever_bytes_come_there_is_a_request_or_a_reason(raw: bytes) -> None:
    for text in (False, True):
        with contextlib.suppress(RequestError):
            parse_line(raw, 1, model=MODEL, text=text)


GOOD = IncomingRequest(0, 1, "a", Endpoint.CHAT, "{}")
BAD = IncomingRequest(1, 2, "b", Endpoint.CHAT, failure=Failure("c", "m", None, 2))


def packed(document: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(document).encode())).decode()


def test_a_chunk_comes_back_as_it_was() -> None:
    message, digest = wire.pack([GOOD, BAD])
    assert wire.unpack(message) == ([GOOD, BAD], digest)
    head = BatchHead("b", MODEL, 3, {"k": [1]})
    assert wire.read_head(json.loads(json.dumps(wire.head_document(head)))) == head


@pytest.mark.parametrize(
    "message",
    [
        "%%%",
        base64.b64encode(b"no zlib").decode(),
        packed({"a": 1}),
        packed([[1]]),
        packed([[-1, 1, "a", "/v1/completions", "{}", None]]),
        packed([[2**31, 1, "a", "/v1/completions", "{}", None]]),
        packed([[True, 1, "a", "/v1/completions", "{}", None]]),
        packed([[0, 1, "a\x00", "/v1/completions", "{}", None]]),
        packed([[0, 1, "\ud800", "/v1/completions", "{}", None]]),
        packed([[0, 1, "a", "/v1/else", "{}", None]]),
        packed([[0, 1, "a", ["/v1/completions"], "{}", None]]),
        packed([[0, 1, "a", "/v1/completions", "\x00é", None]]),
        packed([[0, 1, "a", "/v1/completions", None, None]]),
        packed([[0, 1, "a", "/v1/completions", None, []]]),
        packed([[0, 1, "a", "/v1/completions", None, 5]]),
        base64.b64encode(zlib.compress(b"[" * 200_000)).decode(),
        base64.b64encode(zlib.compress(b"[" + b" " * (65 << 20) + b"]")).decode(),
    ],
)
def test_a_malformed_chunk_is_refused(message: str) -> None:
    with pytest.raises(RequestError, match="chunk is"):
        wire.unpack(message)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"batch_id": "", "model": "m", "priority": 0, "metadata": {}},
        {"batch_id": "b\x00", "model": "m", "priority": 0, "metadata": {}},
        {"batch_id": "b", "model": "\ud800", "priority": 0, "metadata": {}},
        {"batch_id": "b", "model": "m", "priority": 2**31, "metadata": {}},
        {"batch_id": "b", "model": "m", "priority": 0, "metadata": []},
    ],
)
def test_a_message_must_name_its_batch(document: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        wire.read_head(document)


def test_what_a_failure_says_can_be_stored() -> None:
    message = packed([[0, 1, "a", "/v1/completions", None, ["c\x00", "m\ud800", "p\x00"]]])
    (row,), _ = wire.unpack(message)
    assert row.failure == Failure("c\\u0000", "m\\ud800", "p\\u0000", 1)
