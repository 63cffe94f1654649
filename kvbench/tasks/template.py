"""Prompt templates from a config: Jinja expressions over the fields of a row, and little else.

A template's text cannot become large: Jinja's sandbox keeps it from Python's objects,
and what is allowed here (fields, a few filters, conditions, loops over fields) has no way to count up,
to multiply text or to define anything. The text is counted while it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvbench.errors import first_line
from kvbench.tasks.base import MOST_CHARACTERS, TaskError

FILTERS = frozenset(
    (
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
)
ALLOWED = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.Name,
    nodes.Const,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Slice,
    nodes.Filter,
    nodes.If,
    nodes.CondExpr,
    nodes.Compare,
    nodes.Operand,
    nodes.And,
    nodes.Or,
    nodes.Not,
    nodes.Test,
    nodes.For,
    nodes.Concat,
    nodes.Add,
    nodes.Sub,
    nodes.Neg,
    nodes.Tuple,
    nodes.List,
)
DEEPEST = 2
"""Loops inside each other."""


class PromptTemplate:
    """A template, checked when it is made.

    Args:
        name: the option it is given by, for errors.

    Raises:
        TaskError: it is no template, or holds what is not allowed.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=True, cache_size=0
        )
        try:
            tree = environment.parse(text)
            self._refuse(tree, 0)
            self._template = environment.from_string(text)
        except (TemplateError, RecursionError, MemoryError) as problem:
            raise TaskError(f"{name} is no template: {first_line(problem)}") from problem

    def render(self, fields: Mapping[str, Any]) -> str:
        """The text for a row's fields.

        Raises:
            TaskError: a field that is not there, a text that is too long, whatever an expression raises.
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
        except Exception as problem:  # whatever a filter or a comparison raises
            raise TaskError(
                f"{self.name}: {first_line(problem)}; fields there are: {', '.join(sorted(fields))}"
            ) from problem
        return "".join(parts)

    def _refuse(self, node: nodes.Node, depth: int) -> None:
        depth += isinstance(node, nodes.For)
        wrong = type(node).__name__ if not isinstance(node, ALLOWED) or depth > DEEPEST else None
        if isinstance(node, nodes.Filter):
            # text joined by text is as long as both multiplied
            constant = all(isinstance(given, nodes.Const) for given in node.args)
            if node.name not in FILTERS or not constant or node.kwargs:
                wrong = f"filter {node.name}"
        if wrong is not None:
            raise TaskError(
                f"{self.name}, line {node.lineno}: {wrong} is not allowed; allowed: fields, "
                f"conditions, at most {DEEPEST} loops over fields, +, - and ~, and with constant "
                f"arguments the filters {', '.join(sorted(FILTERS))}"
            )
        for child in node.iter_child_nodes():
            self._refuse(child, depth)
