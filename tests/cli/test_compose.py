"""Composing with a base that jobs share gives what Hydra gives, errors included, and composes once."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.check import composer
from kvbench.cli.compose import Compositions, SharingLoader, plain_values

PARTS = (
    ("task=needle", "task=nosuch", "task=longbench", "task=[a]"),
    ("model=hf", "model=tiny_random"),
    ("method=[exact]", "method=[exact,snapkv]", "method=[]", "~method"),
    ("experiment=balancekv_table1", "experiment=demo", "experiment=balancekv_ablation"),
    ("launcher=slurm", "launcher=gpus"),
    ("seed=1", "seed=${limit}", "seed=${oc.env:HOME}", "seed=1,2", "+seed=1", "++seed=2", "~seed"),
    (
        "budget.rate=0.5",
        "budget.rate=0.5,0.25",
        "~budget.rate",
        "budget={rate: 0.1}",
        "budget=null",
    ),
    ("budget.nosuch=1", "+budget.extra=1", "++budget.a.b=1", "+budget.rate=1"),
    ("methods.snapkv.kernel_size=7", "methods.exact.nosuch=7", "~methods.snapkv"),
    ("model.path=x", "+model.api={a: [1, 2]}", "model.name='a,b'"),
    ("hydra.verbose=true", "hydra.nosuch=1", "hydra.runtime.cwd=x", "hydra.mode=NO"),
    ("hydra.job.name=x", "~hydra.job.name", "hydra.job.env_copy=[HOME]", "hydra={job: {name: y}}"),
    ("hydra.launcher.nosuch=1", "hydra/launcher=basic", "hydra.sweeper.params={seed: '1,2'}"),
    ("hydra.searchpath=['file:///nosuch']", "limit=", "limit=a=b", "limit='${seed}'", "limit=???"),
    ("task.seed=${hydra:job.name}", "task_label=${hydra:runtime.choices.model}", "a@b=c"),
)


def composed(loader: ConfigLoader, overrides: Sequence[str], mode: RunMode) -> tuple[str, ...]:
    """The whole config, as written and resolved as far as it can be, or the error."""
    try:
        config = loader.load_configuration("config", list(overrides), mode)
    except Exception as error:  # noqa: BLE001 - whatever Hydra raises is what is compared
        return type(error).__name__, str(error), str(error.__cause__)
    try:
        resolved = str(OmegaConf.to_container(config, resolve=True, throw_on_missing=False))
    except OmegaConfBaseException as error:
        resolved = str(error)
    flags = str([(key, config._get_flag("struct")) for key in config])
    return OmegaConf.to_yaml(config), resolved, flags, str(OmegaConf.is_readonly(config.hydra))


@pytest.fixture(scope="module")
def loaders():
    """Hydra's own loader, and the one that shares, kept from one composition to the next."""
    with composer():
        path = GlobalHydra.instance().config_loader().get_search_path()
        yield ConfigLoaderImpl(path), SharingLoader(ConfigLoaderImpl(path), Compositions())


@pytest.mark.filterwarnings("ignore:provider=")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PARTS).flatmap(st.sampled_from), max_size=5), st.booleans())
def test_a_shared_base_gives_what_hydra_gives(loaders, overrides, sweep):
    mode = RunMode.MULTIRUN if sweep else RunMode.RUN
    theirs, ours = (str(composed(loader, overrides, mode)) for loader in loaders)
    assert _timeless(ours) == _timeless(theirs)


def _timeless(text: str) -> str:
    """Without the second at which ``${now:...}`` was resolved, which may differ between the two."""
    return re.sub(r"\b\d{8}-\d{6}\b", "NOW", text)


def _jobs(sweep: Sequence[str]) -> list[list[str]]:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(sweep))
    return BasicSweeper.split_arguments(parsed, None)[0]


class Counting(SharingLoader):
    """Counts the bases that are merged from files."""

    bases = 0

    def _compose_config_from_defaults_list(self, *arguments, **options) -> DictConfig:
        self.bases += 1
        return super()._compose_config_from_defaults_list(*arguments, **options)


def test_a_sweep_composes_each_choice_of_groups_once(loaders):
    loader = Counting(loaders[0], Compositions())
    master = loader.load_configuration("config", [], RunMode.RUN)
    loader.bases = 0
    jobs = _jobs(["task=needle,longeval_lines", "seed=range(10)", "budget.rate=0.5,0.25"])
    for job in jobs:
        loader.load_sweep_config(master, job)
    assert len(jobs) == 40
    assert loader.bases == 2


VALUES = (
    *("\\${x}", "a${b}", "${b}", "${nowhere}", "${d}", "${d.e}", "${l[0]}", "${oc.env:NO_SUCH}"),
    *(
        "???",
        "${m}",
        "${oc.select:q,3}",
        "${f:3}",
        "x\\\\${b}",
        "${.b}",
        None,
        True,
        1.5,
        [1, "${b}"],
    ),
)


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_plain_values_are_those_of_a_container(value):
    config = OmegaConf.create({"a": value, "b": 1, "d": {"e": "${b}", "n": None}, "l": [1, "${b}"]})
    config.m = "???"
    assert plain_values(config) == OmegaConf.to_container(config)
    try:
        wanted = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        with pytest.raises(type(error)):
            plain_values(config, resolve=True)
    else:
        assert plain_values(config, resolve=True) == wanted
        assert plain_values(config, resolve=True, without=("a",)) == {
            key: inner for key, inner in wanted.items() if key != "a"
        }


def test_configs_of_a_class_loaded_twice_are_copied_as_well():
    """As in a launcher's worker, where Hydra loads its plugins again."""
    from dataclasses import dataclass

    from omegaconf import OmegaConf

    from kvbench.cli.compose import copies_of

    @dataclass
    class Local:  # a class that pickling by name does not find
        value: int = 1

    config = OmegaConf.create({"a": OmegaConf.structured(Local)})
    first, second = (copies_of(config)() for _ in range(2))
    first.a.value = 2
    assert (config.a.value, first.a.value, second.a.value) == (1, 2, 1)
    assert OmegaConf.get_type(first.a) is Local
