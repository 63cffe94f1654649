"""Composing the jobs of a sweep: what they have in common is composed once.

Hydra composes every job from its YAML files, 0.15 s each. But the choices of groups alone decide
which files are merged (`key=value` is applied afterwards), so that jobs with the same choices start
from copies of one config, and each file is read once. What comes out, errors included, is what
Hydra's own loader gives.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast

from hydra import __version__, version
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.conf import ConfigSourceInfo
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, Node, OmegaConf, ValueNode, open_dict

Key = tuple[object, ...]
"""The search path, the run mode and the choices of groups, which together make a base."""


@lru_cache(maxsize=10_000)
def parse(text: str) -> Override:
    """An override as Hydra reads it; not to be changed, for others get the same.

    Raises:
        HydraException, ValueError, RecursionError: it cannot be read.
    """
    (override,) = OverridesParser.create().parse_overrides([text])
    return override


T = TypeVar("T")


def copies_of(value: T) -> Callable[[], T]:
    """A function that gives copies of a config, or of a dictionary of them.

    Unpickling is how OmegaConf copies fastest. A class that was loaded twice cannot be pickled (in a
    launcher's worker Hydra loads its plugins again); there `copy.deepcopy` copies.
    """
    try:
        pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError):
        return lambda: copy.deepcopy(value)
    return lambda: cast(T, pickle.loads(pickled))


@dataclass
class Base:
    """A config before `key=value` is applied.

    Attributes:
        choices: what was chosen of each group, by default or by an override.
        sources: where its files were looked for.
        copy: gives a copy of the config.
    """

    choices: dict[str, Any]
    sources: list[ConfigSourceInfo]
    copy: Callable[[], DictConfig] = lambda: DictConfig({})

    def note_origin(self, config: DictConfig) -> None:
        """Put into a config what it was made from, as Hydra does, whatever was there."""
        with open_dict(config.hydra):
            config.hydra.runtime.choices.update(self.choices)
        config.hydra.runtime.version = __version__
        config.hydra.runtime.version_base = version.getbase()
        config.hydra.runtime.config_sources = self.sources


class Compositions:
    """What is kept from one composition for the next; other processes start with nothing."""

    def __init__(self) -> None:
        self.files: dict[Key, CachingConfigRepository] = {}
        self.groups: dict[tuple[Key, str], bool] = {}
        self.options: dict[Key, list[str]] = {}
        self.bases: dict[Key, Base] = {}

    def __reduce__(self) -> tuple[type[Compositions], tuple[()]]:
        return Compositions, ()


class SharingLoader(ConfigLoaderImpl):
    """Hydra's loader of configs, with a base for each combination of choices."""

    def __init__(self, like: ConfigLoader, kept: Compositions) -> None:
        super().__init__(like.get_search_path())
        self.kept = kept

    def _load_configuration_impl(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Hydra's, step by step, but that the base may be there already."""
        self.ensure_main_config_source_available()
        parsed = [parse(text) for text in overrides]
        if validate_sweep_overrides:
            self.validate_sweep_overrides_legal(parsed, run_mode, from_shell)
        key, choosing = self._base(config_name, parsed, run_mode)
        base = self.kept.bases[key]
        config = base.copy()
        setting = [o for o in parsed if o not in choosing and not o.is_sweep_override()]
        self._apply_overrides_to_config(setting, config)
        said = config.hydra.overrides
        for override in parsed:
            (said.hydra if override.is_hydra_override() else said.task).append(override.input_line)
        if any(o.key_or_group == "hydra" or "runtime" in o.key_or_group for o in setting):
            base.note_origin(config)
        config.hydra.runtime.cwd = os.getcwd()
        job = config.hydra.job
        with open_dict(config.hydra):
            for name in job.env_copy:
                job.env_set[name] = os.environ[name]
        if "name" not in job:
            job.name = JobRuntime().get("name")
        dirname = job.config.override_dirname
        job.override_dirname = get_overrides_dirname(
            overrides=[override for override in parsed if not override.is_hydra_override()],
            kv_sep=dirname.kv_sep,
            item_sep=dirname.item_sep,
            exclude_keys=dirname.exclude_keys,
        )
        job.config_name = config_name
        assert isinstance(config, DictConfig)
        return config

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """Hydra's, looked up once."""
        key = (
            str(self.config_search_path),
            group_name,
            results_filter,
            config_name,
            str(overrides),
        )
        if key not in self.kept.options:
            found = super().get_group_options(group_name, results_filter, config_name, overrides)
            self.kept.options[key] = found
        return list(self.kept.options[key])

    def _base(
        self, config_name: str | None, parsed: Sequence[Override], run_mode: RunMode
    ) -> tuple[Key, list[Override]]:
        """Where the base of these overrides is in `Compositions.bases`, and those of them that it has
        in it."""
        searched = [o for o in parsed if o.get_key_element() == "hydra.searchpath"][:1]
        path: Key = (str(self.config_search_path), config_name, *(o.input_line for o in searched))
        if path not in self.kept.files:
            files = CachingConfigRepository(self.repository)
            self._process_config_searchpath(config_name, searched, files)
            self.kept.files[path] = files
        files = self.kept.files[path]
        choosing = [override for override in parsed if self._chooses(override, path)]
        key = (path, run_mode, *(override.input_line for override in choosing))
        if key not in self.kept.bases:
            defaults = create_defaults_list(
                repo=files,
                config_name=config_name,
                overrides_list=choosing,
                prepend_hydra=True,
                skip_missing=run_mode == RunMode.MULTIRUN,
            )
            own = copy.copy(files)  # merging makes what is merged a part of the result
            own.cache = copies_of(files.cache)()
            config = self._compose_config_from_defaults_list(defaults.defaults, own)
            OmegaConf.set_struct(config, True)
            OmegaConf.set_readonly(config.hydra, False)
            base = Base(
                dict(defaults.overrides.known_choices),
                [ConfigSourceInfo(s.path, s.scheme(), s.provider) for s in files.get_sources()],
            )
            base.note_origin(config)
            base.copy = copies_of(config)
            self.kept.bases[key] = base
        return key, choosing

    def _chooses(self, override: Override, path: Key) -> bool:
        """Whether an override takes part in which files are merged."""
        if override.is_sweep_override() or isinstance(override.value(), dict):
            return False
        name = (path, override.key_or_group)
        if name not in self.kept.groups:
            self.kept.groups[name] = self.kept.files[path].group_exists(override.key_or_group)
        return self.kept.groups[name]


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a plain config and its value, those of inner mappings as ``a.b``."""
    for key, value in values.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")


def job_config(config: DictConfig) -> DictConfig:
    """The config without Hydra's own part; interpolations that ask Hydra can be resolved in it until
    another config is asked for."""
    OmegaConf.set_readonly(config.hydra, True)
    HydraConfig.instance().cfg = config  # type: ignore[assignment]
    if not _NAMES_HYDRA.search(repr(plain_values(config, without=("hydra",)))):
        return config  # nothing in it can tell
    job = copies_of(config)()
    OmegaConf.set_struct(job, None)
    del job["hydra"]
    return job


_NAMES_HYDRA = re.compile(r"\$\{.*hydra(?!:)")


def plain_values(node: Node, *, resolve: bool = False, without: Sequence[str] = ()) -> Any:
    """What `OmegaConf.to_container` gives, in a tenth of the time.

    Args:
        without: keys of the outermost mapping to leave out.

    Raises:
        OmegaConfBaseException: an interpolation that leads nowhere.
    """
    if resolve and node._is_interpolation():
        found = node._dereference_node()
        return found._value() if isinstance(found, ValueNode) else plain_values(found, resolve=True)
    value = node._value()
    if isinstance(node, DictConfig) and isinstance(value, dict):
        inner = ((key, child) for key, child in value.items() if key not in without)
        return {key: plain_values(child, resolve=resolve) for key, child in inner}
    if isinstance(node, ListConfig) and isinstance(value, list):
        return [plain_values(child, resolve=resolve) for child in value]
    return value
