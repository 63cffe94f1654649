"""Command-line overrides: every value of a sweep, and what is wrong with them in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, Node

from kvbench.nearest import nearest


def sample_overrides(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Override lists that together contain every value of every sweep: the first value of each, then
    each other value in turn (not the product: values are wrong one at a time)."""
    choices = [
        _values(override) for override in OverridesParser.create().parse_overrides(list(overrides))
    ]
    base = [values[0] for values in choices]
    yield base
    for index, values in enumerate(choices):
        for value in values[1:]:
            yield [*base[:index], value, *base[index + 1 :]]


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key = override.get_key_element()
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line for a composition error: the thing, the value, what is allowed, the nearest valid."""
    text = str(error)
    missing = re.search(r"[Cc]ould not (?:find|load) '([^']+)'", text)
    if missing and "/" in missing.group(1):
        group, _, choice = missing.group(1).rpartition("/")
        allowed = _group_choices(group)
        return (
            f"unknown {group} {choice!r}{nearest(choice, allowed)}; allowed: {', '.join(allowed)}"
        )
    for key in (o.key_or_group for o in OverridesParser.create().parse_overrides(list(overrides))):
        if re.search(rf"'{re.escape(key)}'|\b{re.escape(key.rpartition('.')[2])}\b", text):
            return _explain_key(key, overrides) or _first_line(text)
    return _first_line(text)


def _first_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines()[:2] if line.strip())


def _group_choices(group: str) -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    return sorted(loader.get_group_options(group, ObjectType.CONFIG))


def _explain_key(key: str, overrides: Sequence[str]) -> str | None:
    """Walk down the key in the config that the group choices alone compose to."""
    groups = [
        o.input_line
        for o in OverridesParser.create().parse_overrides(list(overrides))
        if o.input_line and o.key_or_group in _groups()
    ]
    composed = compose("config", overrides=[str(line) for line in groups])
    node: Node | None = composed
    walked: list[str] = []
    parts = key.split(".")
    for part in parts:
        if not isinstance(node, DictConfig):
            return f"{'.'.join(walked)!r} has no keys, so {key!r} is unknown"
        allowed = [str(name) for name in node]
        if not walked:
            allowed = sorted({*allowed, *_groups()})
        if part not in allowed:
            where = f" of {'.'.join(walked)}" if walked else ""
            return (
                f"unknown key {part!r}{where}{nearest(part, allowed)}; allowed: "
                f"{', '.join(name for name in allowed if not name.startswith('_'))}"
            )
        walked.append(part)
        node = node._get_node(part) if part in node else None
    return None


def _groups() -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    return [g for g in loader.get_group_options("", ObjectType.GROUP) if not g.startswith("hydra")]
