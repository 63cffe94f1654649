"""Prompt templates from a config: Jinja over the fields of a row, in Jinja's sandbox.

The sandbox keeps a template from Python's objects. Here it also keeps a short template from filling the
memory by mistake. A template has no blocks but ``{% if %}`` and ``{% for %}``, so that it cannot store a
text and double it. It calls nothing (no methods, no ``range``), does not multiply, and has only the
filters of `FILTERS`. The length of its text is checked while the text is made.

Not bounded: the time of loops inside loops that print nothing, and the text that one expression makes by
``join`` with a long separator or by many filters in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, Undefined, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from kvbench.errors import first_line
from kvbench.prompts import MOST_CHARACTERS
from kvbench.tasks.base import TaskError

FILTERS = (
    "capitalize",
    "default",
    "first",
    "int",
    "items",
    "join",
    "last",
    "length",
    "lower",
    "round",
    "string",
    "title",
    "tojson",
    "trim",
    "upper",
)
"""The filters of Jinja that a template may use. None of them pads a text."""

BLOCKS = (nodes.If, nodes.For)
"""The blocks of Jinja that a template may use: none stores a text, so that the text which is made is
counted as it grows."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox without calls and without the operators that make long texts or large numbers."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, keep_trailing_newline=True, cache_size=0)
        self.filters = {name: self.filters[name] for name in FILTERS}
        self.globals.clear()

    def is_safe_callable(self, obj: Any) -> bool:
        """Refuse every call, but leave that of an undefined name to the error that names it."""
        return isinstance(obj, Undefined)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse an operator of `intercepted_binops`."""
        raise SecurityError(f"operator {operator} is not allowed; allowed: +, - and ~")


class PromptTemplate:
    """A prompt template.

    Args:
        name: the option that holds the template, for messages.
        text: the template.

    Raises:
        TaskError: the text is no template, or has a filter that is not in `FILTERS` or a block that is
            not in `BLOCKS`.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        sandbox = _Sandbox()
        try:
            parsed = sandbox.parse(text)
            for statement in parsed.find_all(nodes.Stmt):
                if not isinstance(statement, (nodes.Output, *BLOCKS)):
                    block = type(statement).__name__
                    raise SecurityError(f"line {statement.lineno} has a block of type {block}")
            self._template = sandbox.from_string(parsed)
        except (TemplateError, RecursionError, MemoryError) as problem:
            raise TaskError(
                f"{name} is no template: {first_line(problem)}; allowed: Jinja with the blocks if and "
                f"for and the filters {', '.join(FILTERS)}"
            ) from problem

    def render(self, fields: Mapping[str, Any]) -> str:
        """Render the template with the fields of a row.

        Raises:
            TaskError: a field is missing, the text has more than `MOST_CHARACTERS` characters, or an
                expression is not allowed or raises an error.
        """
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(fields):
                parts.append(part)
                length += len(part)
                if length > MOST_CHARACTERS:
                    reason = f"{self.name} makes more than {MOST_CHARACTERS} characters"
                    raise TaskError(f"{reason}; allowed: fewer")
        except TaskError:
            raise
        except Exception as problem:
            # A filter or a comparison may raise anything.
            raise TaskError(
                f"{self.name}: {first_line(problem)}; fields there are: {', '.join(sorted(fields))}"
            ) from problem
        return "".join(parts)
