"""Templates of a config: Jinja over the fields of a row, in Jinja's own sandbox, which keeps a template
from Python's objects and from changing a row."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvbench.errors import first_line
from kvbench.tasks.base import TaskError

MOST_EXACT = 2**53
"""Below this a float holds every whole number."""


def whole(value: str | float) -> str | float:
    """A float as the whole number that it is, since a column with gaps makes 4711.0 of 4711. Raises
    ValueError where a float cannot hold all digits."""
    if isinstance(value, float) and value.is_integer():
        if abs(value) > MOST_EXACT:
            raise ValueError(f"{value!r} has lost digits; allowed: the number as text")
        return int(value)
    return value


def as_text(value: str | float) -> str:
    """A text, number or boolean as a person writes it; see `whole`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(whole(value))


def lettered(options: Sequence[str | float]) -> str:
    """The options on lines of their own, each behind its letter (the filter ``choices | lettered``)."""
    lines = zip(string.ascii_uppercase, options, strict=False)
    return "\n".join(f"{letter}. {as_text(option)}" for letter, option in lines)


def _printed(value: Any) -> Any:
    """The text of a printed value, which must not be Python's form of a list, of None or of a
    function."""
    if isinstance(value, Undefined):
        return value  # which is an error of its own
    if isinstance(value, str | int | float):
        return as_text(value)
    if isinstance(value, date | Decimal):
        return str(value)
    kind = "a list" if isinstance(value, list | tuple) else f"{type(value).__name__}"
    raise ValueError(f"{{{{ ... }}}} is {kind}; allowed: text, e.g. {{{{ x[0] }}}}, x | join(', ')")


_SANDBOX = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined, keep_trailing_newline=True, finalize=_printed
)
_SANDBOX.filters["lettered"] = lettered


class PromptTemplate:
    """A template; `name` is the option that holds it, for messages."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        only = re.fullmatch(r"\{\{((?:(?!\{\{|\}\}|\{%).)*)\}\}", text, re.DOTALL)
        try:
            self._template = _SANDBOX.from_string(text)
            self._only = _SANDBOX.compile_expression(only[1], False) if only else None
        except (TemplateError, RecursionError, MemoryError) as problem:
            raise TaskError(
                f"{name} is no template: {first_line(problem)}; allowed: Jinja over a row's fields"
            ) from problem

    def render(self, fields: Mapping[str, Any], place: str) -> str:
        return str(self._made(self._template.render, fields, place))

    def value(self, fields: Mapping[str, Any], place: str) -> Any:
        """The value of the expression where the template is one alone, ``{{ x }}``, else the text."""
        value = self._made(self._only or self._template.render, fields, place)
        if isinstance(value, Undefined):
            return self.render(fields, place)  # and its error
        return value

    def _made(self, make: Any, fields: Mapping[str, Any], place: str) -> Any:
        try:
            return make({str(name): value for name, value in fields.items()})
        except Exception as problem:  # a filter or a comparison may raise anything
            raise TaskError(
                f"{self.name}: {place}: {first_line(problem)}; fields there are: "
                f"{', '.join(map(str, fields))}"
            ) from problem


@cache
def template(name: str, text: str) -> PromptTemplate:
    return PromptTemplate(name, text)
