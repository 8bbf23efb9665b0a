"""Runs a model's chat template as Hugging Face does: jinja2, sandboxed, immutable."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flowprefill.errors import InvalidRequestError, UnsupportedTokenizerError


class ChatTemplate:
    """Messages -> prompt text.

    Raises UnsupportedTokenizerError if `source` is no valid template.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        self._named_tokens = dict(named_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedTokenizerError(
                f"chat template, line {error.lineno}: {error.message}"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """Raises InvalidRequestError if the template refuses the messages."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self._named_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidRequestError(f"messages: the chat template says: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks training targets; the text stays as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
