"""Command-line overrides: every value of a sweep, and what is wrong with them in one line.

Nothing here imports torch, so that usage errors come at once.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Glob, Override, Sweep
from hydra.errors import HydraException
from omegaconf import DictConfig, Node
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.aliases import DTYPE_NAMES
from kvbench.cli.compose import flattened, parse, plain_values
from kvbench.errors import UserError, names_a_secret, nearest, needs_extra
from kvbench.errors.options import (
    Count,
    NonNegative,
    Positive,
    Share,
    Text,
    Whole,
    allowed,
    fits,
    passing,
    refusal,
)
from kvbench.records.shards import ALLOWED as ALLOWED_SHARD
from kvbench.records.shards import Shard

COMMANDS = ("list", "show", "released")
COMPOSING = (
    *(HydraException, OmegaConfBaseException, ValueError, TypeError),
    *(AssertionError, AttributeError, LookupError, RecursionError),
)
"""What composing raises where Hydra did not think of an override."""
MOST_SHARDS = MOST_WORKERS = 1000
MOST_VALUES = 1000
"""Of one key in a sweep."""
DEEPEST = 20
"""Lists and mappings in one another."""


def check_syntax(overrides: Sequence[str], *, sweep: bool) -> None:
    """Refuse overrides that are wrong as text.

    Args:
        sweep: whether the jobs of a sweep are asked for (``-m``).

    Raises:
        UserError: naming the override.
    """
    keys: dict[str, str] = {}
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise UserError(
                f"{text!r} is not an override{nearest(text, COMMANDS)}; allowed: key=value, or "
                "first of all list, show or released"
            )
        try:
            override = _parse(text)
        except (HydraException, ValueError, RecursionError) as error:  # also numbers without end
            raise UserError(
                f"cannot read {text!r}; allowed: key=value, key=[a,b], and quotes around what has "
                "brackets, blanks or = in it"
            ) from error
        value: Any = override.value()
        sweeps = isinstance(value, Sweep | Glob)
        for each in getattr(value, "list", None) or [] if sweeps else [value]:
            if _depth(each) > DEEPEST:
                raise UserError(
                    f"{text!r} has a sweep, or lists without end, in lists; allowed: values"
                )
        if override.is_sweep_override():
            if not sweep:
                raise UserError(
                    f"{text!r} has several values; allowed: -m for one job each, or "
                    f"{override.key_or_group}=[...] for a list"
                )
            if not override.is_discrete_sweep() or not _values(override):
                raise UserError(
                    f"{text!r} is no list of values; allowed: {override.key_or_group}=a,b,c"
                )
            if len(_values(override)) > MOST_VALUES:
                raise UserError(f"{text!r} has too many values; allowed: at most {MOST_VALUES}")
        key = override.get_key_element()
        if names_a_secret(override.key_or_group):
            raise UserError(
                f"{key} is given a value, which the results would keep; allowed: the environment "
                "(HF_TOKEN, WANDB_API_KEY)"
            )
        if key == "methods":
            raise UserError(
                "methods has the methods' options, e.g. methods.snapkv.kernel_size=7"
                f"{_suggestion(value)}; allowed: method=[...] to choose them"
            )
        if key in keys:
            together = f"; several as {key}=[...]" if override.key_or_group in _groups() else ""
            raise UserError(
                f"{key} is given twice ({keys[key]} and {text}); allowed: once{together}"
            )
        keys[key] = text


def _suggestion(value: object) -> str:
    values = value if isinstance(value, list) else [value]
    names = [name for name in values if isinstance(name, str) and name]
    if not names or len(names) < len(values):
        return ""
    return f" (did you mean method=[{','.join(names)}]?)"


def sample_overrides(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Override lists that together contain every value of every sweep: the first value of each, then
    each other value in turn (not the product: values are wrong one at a time)."""
    choices = [_values(_parse(text)) for text in overrides]
    base = [values[0] for values in choices]
    yield base
    for index, values in enumerate(choices):
        for value in values[1:]:
            yield [*base[:index], value, *base[index + 1 :]]


def job_count(overrides: Sequence[str]) -> int:
    """Jobs that the values of all sweeps make."""
    return math.prod(len(_values(_parse(text))) for text in overrides)


def _parse(text: str) -> Override:
    override = copy.copy(parse(text))
    if GlobalHydra.instance().is_initialized():
        override.config_loader = GlobalHydra.instance().config_loader()  # for glob(*)
    return override


def _values(override: Override) -> list[str]:
    """Every value of a sweep as an override, or the one there is; no more than one too many."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key = override.get_key_element()
    return [f"{key}={v}" for v in islice(override.sweep_string_iterator(), MOST_VALUES + 1)]


def _depth(value: object) -> int:
    """How many lists and mappings a value has in one another; a sweep in them has no end."""
    if isinstance(value, Sweep | Glob):
        return DEEPEST + 1
    if isinstance(value, Mapping):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line for a composition error: the thing, the value, what is allowed, the nearest valid."""
    text = "" if isinstance(error, AssertionError) else str(error)
    text = text or f"Hydra cannot compose {' '.join(overrides)} ({type(error).__name__})"
    missing = re.search(r"[Cc]ould not (?:find|load) '([^']+)'", text)
    if missing and "/" in missing.group(1):
        group, _, choice = missing.group(1).rpartition("/")
        if group == "hydra/launcher" and choice.startswith("submitit"):
            return "launcher: " + needs_extra("hydra-submitit-launcher", "slurm")
        allowed = _group_choices(group)
        return (
            f"unknown {group} {choice!r}{nearest(choice, allowed)}; allowed: {', '.join(allowed)}"
        )
    keys = [_parse(text).key_or_group for text in overrides]
    for key in (key for key in keys if key not in _groups() and not key.startswith("hydra.")):
        if re.search(rf"'{re.escape(key)}'|\b{re.escape(key.rpartition('.')[2])}\b", text):
            return _explain_key(key, overrides) or _first_line(text, error.__cause__)
    return _first_line(text, error.__cause__)


def _first_line(text: str, cause: BaseException | None = None) -> str:
    why = str(cause or "").strip().partition("\n")[0]
    first = " ".join(line.strip() for line in text.splitlines()[:2] if line.strip())
    return f"{first}: {why}" if why and why not in first else first


def _group_choices(group: str) -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    names = loader.get_group_options(group, ObjectType.CONFIG)
    return sorted(name for name in names if not name.startswith("_"))


def _explain_key(key: str, overrides: Sequence[str]) -> str | None:
    """Walk down the key in the config that the group choices alone compose to."""
    groups = [text for text in overrides if _parse(text).key_or_group in _groups()]
    try:
        composed = compose("config", overrides=groups)
    except COMPOSING:  # then it is not the key that is wrong
        return None
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
            keys = [name for name, _ in flattened(plain_values(composed))]
            inner = [] if walked else [name for name in keys if name.endswith(f".{key}")]
            meant = f" (did you mean {' or '.join(inner)}?)" if inner else nearest(part, allowed)
            return (
                f"unknown key {part!r}{where}{meant}; allowed: "
                f"{', '.join(name for name in allowed if not name.startswith('_'))}"
            )
        walked.append(part)
        node = node._get_node(part) if part in node else None
    return None


def _groups() -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    return [g for g in loader.get_group_options("", ObjectType.GROUP) if not g.startswith("hydra")]


def check_groups(overrides: Sequence[str]) -> None:
    """Refuse wrong values of groups (``model=``, ``method=[...]``).

    Raises:
        UserError: naming the group.
    """
    for override in map(_parse, overrides):
        group, value = override.key_or_group, override.value()
        if group not in _groups() or override.is_delete() or override.is_sweep_override():
            continue
        several = group == "method"
        allowed = ", ".join(_group_choices(group))
        if isinstance(value, list) and several:
            names = Counter(str(name) for name in value)
            twice = [name for name, count in names.items() if count > 1]
            if not names:
                raise UserError(f"method is empty; allowed: one or more of {allowed}")
            if twice:
                raise UserError(f"method names {twice[0]!r} twice; allowed: each once")
        elif isinstance(value, str) and value.startswith("_"):  # what others of its group share
            raise UserError(f"unknown {group} {value!r}; allowed: {allowed}")
        elif not isinstance(value, str) or not value:
            how = "one or more" if several else "one"
            raise UserError(
                f"{override.input_line!r} names no {group}; allowed: {how} of {allowed}"
            )


def check_values(config: DictConfig) -> None:
    """Refuse wrong values of the common keys.

    Raises:
        UserError: naming the key.
    """
    values: Any = plain_values(config, without=("hydra",))
    for key, value in flattened(values):
        if value == "???":
            raise UserError(f"{key} has no value; allowed: {key}=...")
    for key, hint in _RULES.items():
        head, _, last = key.rpartition(".")
        place = values.get(head) if head else values
        if head and not isinstance(place, Mapping):
            raise UserError(f"{head} is {place!r}; allowed: its keys, e.g. {key}={_EXAMPLES[key]}")
        if last in place and not fits(hint, place[last]):
            meant = DTYPE_NAMES.get(str(place[last])) if last == "dtype" else None
            nearby = f" (did you mean {meant!r}?)" if meant else ""
            raise UserError(f"{key} is {place[last]!r}{nearby}; allowed: {allowed(hint)}")
    for group in ("model", "task", "launcher"):
        if not isinstance(values.get(group), Mapping):
            raise UserError(
                f"{group} is {values.get(group)!r}; allowed: {', '.join(_group_choices(group))}"
            )
    launcher, chosen = values["launcher"], HydraConfig.get().runtime.choices["launcher"]
    if launcher.get("name") != chosen:
        raise UserError(f"launcher.name is {launcher.get('name')!r}; allowed: launcher=...")
    for key, hint in _LAUNCHER.items():
        if key in launcher and not fits(hint, launcher[key]):
            raise UserError(refusal(f"launcher.{key}", launcher[key], hint))
    methods = values.get("methods")
    if not isinstance(methods, Mapping) or not methods:
        raise UserError("method is empty; allowed: one or more of conf/method, e.g. method=[exact]")
    for label, method in methods.items():
        if not isinstance(method, Mapping):
            raise UserError(
                f"methods.{label} is {method!r}; allowed: its keys, e.g. methods.h2o.decode=grow"
            )


def _parses(parse: Callable[[Any], object], value: Any) -> bool:
    try:
        parse(value)
    except ValueError:
        return False
    return True


def is_folder_name(value: Any) -> bool:
    """A folder's name as the store would write it, unchanged."""
    if not isinstance(value, str) or len(value.encode(errors="replace")) > 120:
        return False
    return bool(re.fullmatch(_NAME, value))


def _name(value: Any) -> bool:
    """A folder's name, or one with an interpolation: checked again once it is resolved."""
    return is_folder_name(value) or (isinstance(value, str) and "${" in value)


_NAME = r"[\w+=@-][\w.+=@-]*"
_FOLDER = passing(_name, "a folder's name")
_RULES: dict[str, Any] = {
    "budget.rate": Share,
    "budget.sink": Whole,
    "budget.window": Whole,
    "budget.total_rate": Share | None,
    "budget.size": Count | None,
    "seed": Whole,
    "limit": Count | None,
    "shard": passing(lambda v: _parses(Shard.parse, v), ALLOWED_SHARD),
    "shards": Annotated[int, Ge(1), Le(MOST_SHARDS)] | None,
    "device": passing(
        lambda v: isinstance(v, str) and bool(re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", v)),
        "auto | cpu | mps | cuda | cuda:N",
    ),
    "dtype": Literal["auto", "float32", "bfloat16", "float16"],
    "compress_after": Literal["prompt", "context"],
    "example_timeout": Positive | None,
    "decode": Literal["auto", "eager", "graph"],
    "batch_size": Literal["auto"] | Count,
    "lock_timeout": NonNegative,
    "retry_failed": bool,
    "dry_run": bool,
    "experiment_name": _FOLDER,
    "task_label": _FOLDER,
    "results_dir": passing(lambda v: isinstance(v, str) and v != "", "a folder"),
}
"""What the common keys may be."""
_LAUNCHER: dict[str, Any] = {
    **dict.fromkeys(("partition", "account", "qos", "constraint", "gres"), Text | int | None),
    **dict.fromkeys(("gpus_per_node", "cpus_per_task", "mem_gb"), Count | None),
    "timeout_min": Annotated[int, Ge(5), "minutes, an integer >= 5"],
    "max_num_timeout": Whole,
    "array_parallelism": Count,
    "setup": passing(
        lambda v: isinstance(v, tuple) and all(isinstance(line, str) for line in v),
        "a list of lines of shell, e.g. ['module load cuda']",
    ),
    "sbatch": Annotated[Mapping[str, Any] | None, "options of sbatch, e.g. {reservation: x}"],
    "poll_s": Positive,
    "workers": Annotated[int, Ge(1), Le(MOST_WORKERS), f"a positive integer up to {MOST_WORKERS}"]
    | None,
    "gpus_per_worker": Count,
}
"""Of launcher=slurm and, from `workers` on, launcher=gpus."""
_EXAMPLES = {
    **{"budget.rate": 0.25, "budget.sink": 32, "budget.window": 32},
    **{"budget.size": 2000, "budget.total_rate": 0.2},
}
