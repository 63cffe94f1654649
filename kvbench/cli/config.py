"""From what a user types to checked configs, with one line for what is wrong in it.

Hydra composes; the settings are checked by their type hints. Nothing here imports torch, so that wrong
usage is told at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from kvbench.cli.catalogue import catalogue, config_dir
from kvbench.cli.papers import experiment_called
from kvbench.errors import UserError, first_line, names_a_secret, nearest, needs_extra, text_of
from kvbench.errors.options import (
    Count,
    NonNegative,
    Positive,
    Text,
    Whole,
    check_options,
    hints_of,
    passing,
)
from kvbench.records.shards import Shard

COMPOSING = (
    *(HydraException, OmegaConfBaseException, ValueError, TypeError),
    *(AssertionError, AttributeError, LookupError, RecursionError),
)
"""What Hydra raises for overrides that it cannot compose."""
GROUPS = ("model", "task", "method", "logger", "launcher", "experiment")


def expanded(overrides: Sequence[str]) -> list[str]:
    """The overrides with ``model=<Hub id or folder>`` as ``model=hf model.path=<...>`` and experiments by
    their own names in place of older ones.

    Raises:
        UserError: a value that the results would keep and must not.
    """
    given = {text.partition("=")[0] for text in overrides}
    found: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        values = [part.strip("'\"") for part in value.split(",")]
        if names_a_secret(key):
            raise UserError(
                f"{key} is given a value, which the results would keep; allowed: the environment "
                "(HF_TOKEN, WANDB_API_KEY)"
            )
        if key == "experiment":
            found.append(f"experiment={','.join(map(experiment_called, values))}")
        elif key == "model" and "model.path" not in given and all(map(_is_path, values)):
            found += ["model=hf", f"model.path={value}"]
            name = Path(values[0]).name
            if "model.name" not in given and Path(values[0]).is_dir() and len(values) == 1:
                found += [f"model.name={name}"] if re.fullmatch(r"[A-Za-z][\w.-]*", name) else []
        else:
            found.append(text)
    return found


def _is_path(value: str) -> bool:
    """A Hub id or a folder, and no name of conf/model."""
    if value in catalogue("models") or value in ("", ".", ".."):
        return False
    try:
        return ("/" in value and "=" not in value) or Path(value).is_dir()
    except (OSError, ValueError):  # no name that a folder can have
        return False


@contextmanager
def hydra_of_conf() -> Iterator[Hydra]:
    """Hydra, ready to compose configs from conf/.

    Raises:
        UserError: what it cannot compose, in one line.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir().resolve()), version_base="1.3", job_name="kvbench"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            yield hydra
        except (HydraException, OmegaConfBaseException, RecursionError) as error:
            raise UserError(explain(error)) from error


def composed(hydra: Hydra, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
    """The config of these overrides, Hydra's part included; of a sweep without the keys in which its jobs
    differ.

    Raises:
        UserError: what cannot be composed, and what is allowed.
    """
    with explaining():
        config = hydra.compose_config("config", list(overrides), mode)
    HydraConfig.instance().set_config(config)  # for interpolations that ask Hydra
    return config


@contextmanager
def explaining() -> Iterator[None]:
    """Turns what Hydra raises while it composes into a `UserError` of one line."""
    try:
        yield
    except UserError:
        raise
    except COMPOSING as error:
        raise UserError(explain(error)) from error


def explain(error: BaseException) -> str:
    """One line for what cannot be composed: the thing, the value, what is allowed, the nearest to it."""
    text = " ".join(text_of(error).split()) or f"Hydra cannot compose this ({type(error).__name__})"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    missing = re.search(r"Could not (?:find|load) '([^']+)/([^'/]*)'", text)
    if missing:
        group, choice = missing.groups()
        if group == "hydra/launcher":
            return "launcher: " + needs_extra("hydra-submitit-launcher", "slurm")
        names = list(catalogue(group)) if group in GROUPS else []
        return f"unknown {group} {choice!r}{nearest(choice, names)}; allowed: {', '.join(names)}"
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read {error.override!r}{nearest(error.override, ('list', 'show', 'released'))}; "
            "allowed: key=value, key=[a,b], and quotes around what has brackets, blanks or = in it"
        )
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key} has no value; allowed: {cause.full_key}=..."
    parent = getattr(cause, "parent_node", None)
    if "not in" in text_of(cause or error) and isinstance(parent, DictConfig):
        return _unknown_key(parent, str(getattr(cause, "key", "")), str(cause.full_key))  # type: ignore[union-attr]
    return f"{text}: {first_line(cause)}" if cause is not None and cause is not error else text


def _unknown_key(parent: DictConfig, key: str, full_key: str) -> str:
    names = [str(name) for name in parent]
    if not isinstance(parent._value(), dict):
        return f"{full_key!r} is unknown: what it is in has no keys"
    where = full_key.removesuffix(key).rstrip(".")
    if where:
        return (
            f"unknown key {key!r} of {where}{nearest(key, names)}; allowed: "
            f"{', '.join(name for name in names if not name.startswith('_'))}"
        )
    names = sorted({*names, *GROUPS} - {"hydra"})
    nodes = ((name, parent._get_node(name)) for name in names if name in parent)
    inner = [
        f"{name}.{key}" for name, node in nodes if isinstance(node, DictConfig) and key in node
    ]
    meant = f" (did you mean {' or '.join(inner)}?)" if inner else nearest(key, names)
    return f"unknown key {key!r}{meant}; allowed: {', '.join(names)}"


def is_folder_name(value: object) -> bool:
    """Whether the store would write it as it is."""
    if not isinstance(value, str) or len(value.encode(errors="replace")) > 120:
        return False
    return bool(re.fullmatch(r"[\w+=@-][\w.+=@-]*", value))


FolderName = passing(is_folder_name, "a folder's name")
Keys = Annotated[Mapping[str, Any], "its keys"]
Chosen = passing(
    lambda value: (
        isinstance(value, Mapping) and all(isinstance(v, Mapping) for v in value.values())
    ),
    "method=[...] to choose them, methods.<method>.<option>=... to set their options",
)
Device = passing(
    lambda v: isinstance(v, str) and bool(re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", v)),
    "auto | cpu | mps | cuda | cuda:N",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of a composed config and what each may be; conf/config.yaml has their defaults and says
    what they are."""

    model: Keys
    task: Keys
    methods: Chosen
    budget: Keys
    sampling: Keys
    logger: Keys
    launcher: Keys
    experiment_name: FolderName
    results_dir: Text
    task_label: FolderName
    seed: Whole
    limit: Count | None
    shard: str | None
    shards: Annotated[int, Ge(1), Le(1000)] | None
    device: Device
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    compress_after: Literal["prompt", "context"]
    decode: Literal["auto", "eager", "graph"]
    example_timeout: Positive | None
    batch_size: Literal["auto"] | Count
    retry_failed: bool
    paper_table: Any
    lock_timeout: NonNegative
    dry_run: bool

    @staticmethod
    def of(config: DictConfig) -> Settings:
        """The settings of a composed config, interpolations resolved.

        Raises:
            UserError: an unknown key, a missing value or one that is not allowed.
        """
        known = hints_of(Settings)
        with explaining():
            part = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            values: Any = OmegaConf.to_container(part, resolve=True, throw_on_missing=True)
        for key in values:
            if key not in known:
                names = ", ".join(known)
                raise UserError(f"unknown key {key!r}{nearest(key, list(known))}; allowed: {names}")
        for key in known:
            if key not in values:
                raise UserError(f"{key} is missing; allowed: {key}=...")
        made = Settings(**values)
        check_options(made, "", UserError)
        Shard.parse(made.shard)
        if not made.methods:
            raise UserError("method is empty; allowed: one or more of kvbench list methods")
        return made


def results_folder(value: object) -> Path:
    """The folder for results that a config names, ``~`` expanded.

    Raises:
        UserError: it cannot be a folder's name: no text, not UTF-8, a name too long, an unknown user.
    """
    try:
        if isinstance(value, str) and value and "\0" not in value:
            folder = Path(value).expanduser()
            if all(len(part.encode()) <= 255 for part in folder.parts):
                return folder
    except (RuntimeError, UnicodeEncodeError):  # no such user, or bytes that are no text
        pass
    raise UserError(
        f"results_dir is {value!r:.300}; allowed: a folder, in UTF-8, names of at most 255 bytes, and "
        "after ~ no user but one of this machine"
    )
