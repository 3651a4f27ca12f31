"""Chat templates: the checkpoint's own Jinja, sandboxed.

The variables, filters and functions are those that templates on the hub are written against.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from batchtp.errors import RequestError, TokenizerError


class ChatTemplate:
    """A compiled template. `tokens` are the special tokens' texts (bos_token, eos_token, …)."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Raises TokenizerError when it is not valid Jinja."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"The chat template is not valid: {error}") from error
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for these messages, ready for the answer. Raises RequestError."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise RequestError(
                "chat_template_error",
                f"The chat template refuses the messages: {error}",
                "messages",
            ) from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The block's body as it is."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
