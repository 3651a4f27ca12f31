"""Renders chat messages with a checkpoint's own Jinja template, as transformers does, sandboxed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchtp.errors import RequestError, TokenizerError

# What a template may raise on a conversation that it was not written for.
_RENDER_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled template. `special_tokens`: bos_token and the like, as the template names them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises TokenizerError when the template is not valid Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TokenizerError(f"The checkpoint's chat template is malformed: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as text, up to where the answer starts.

        Raises RequestError("chat_template_error") when the template refuses the messages.
        """
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
            )
        except _RENDER_ERRORS as error:
            raise RequestError(
                "chat_template_error",
                f"The model's chat template does not take these messages: {error}",
                "messages",
            ) from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is just its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes up to `endgeneration`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
