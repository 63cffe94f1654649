"""Prompt templates from a config: Jinja expressions over the fields of a row, and little else.

Jinja's sandbox keeps a template from Python's objects. Beyond that only fields, a few filters,
conditions and loops over fields are allowed. They cannot count up, multiply text or define anything, so
that a template cannot make an endless text; the length of the text is checked while it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvbench.errors import first_line
from kvbench.prompts import MOST_CHARACTERS
from kvbench.tasks.base import TaskError

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
"""How many loops may be nested."""


class PromptTemplate:
    """A prompt template, which is checked when it is made.

    Args:
        name: the option that holds the template, for messages.
        text: the template.

    Raises:
        TaskError: the text is no template, or contains an expression that is not allowed.
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
        """Render the template with the fields of a row.

        Raises:
            TaskError: a field is missing, the text is too long, or an expression raises an error.
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

    def _refuse(self, node: nodes.Node, depth: int) -> None:
        """Refuse a node of the template, or one below it, that is not allowed.

        Args:
            depth: the number of loops around the node.

        Raises:
            TaskError: the line and the kind of the node.
        """
        if isinstance(node, nodes.For):
            depth += 1
        wrong = None
        if not isinstance(node, ALLOWED) or depth > DEEPEST:
            wrong = type(node).__name__
        if isinstance(node, nodes.Filter):
            # Arguments must be constant: a text joined by another is as long as the product of both.
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
