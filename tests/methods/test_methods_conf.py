"""conf/method: every YAML composes to the constructor call of one method, with every option in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench.methods import available_methods, build_method, method_class

CONF = Path(__file__).resolve().parents[2] / "conf"
LABELS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))


def method_and_preset(label: str) -> tuple[str, str | None]:
    """``snapkv`` or ``<method>_<preset>``."""
    if label in available_methods():
        return label, None
    name = max((n for n in available_methods() if label.startswith(f"{n}_")), key=len)
    return name, label.removeprefix(f"{name}_")


@pytest.fixture
def config():
    def make(*overrides: str):
        with initialize_config_dir(str(CONF), version_base=None):
            return compose("config", overrides=list(overrides))

    return make


@pytest.mark.parametrize("label", LABELS)
def test_yaml_is_the_method_with_its_defaults(label, config):
    node = config(f"method=[{label}]").methods[label]
    name, preset = method_and_preset(label)
    options = {str(key) for key in node} - {"_target_"}
    assert options == {field.name for field in dataclasses.fields(method_class(name))}
    text = (CONF / "method" / f"{label}.yaml").read_text().splitlines()
    assert text[0] == f"# @package methods.{label}"
    assert text[1].startswith("# ")
    try:
        made = instantiate(node, _convert_="all")
    except InstantiationException as failure:
        if "needs the package" in str(failure):
            pytest.skip(f"{name} needs a package that is not installed")
        raise
    assert made == build_method(name, preset)


def test_every_method_and_preset_has_a_yaml():
    for name in available_methods():
        assert {name, *(f"{name}_{preset}" for preset in method_class(name).presets)} <= set(LABELS)


def test_selecting_many(config):
    methods = config(
        "method=[snapkv,h2o,balancekv_released]", "methods.snapkv.kernel_size=7"
    ).methods
    assert list(methods) == ["snapkv", "h2o", "balancekv_released"]
    assert methods.snapkv.kernel_size == 7
    lists = config("method=[balancekv]", "methods.balancekv.block_size=[64,32]").methods
    assert instantiate(lists.balancekv, _convert_="all").block_size == (64, 32)


def test_unknown_options_are_refused(config):
    with pytest.raises(Exception, match="kernel"):
        config("method=[snapkv]", "methods.snapkv.kernel=7")


def test_papers_are_named():
    for name in available_methods():
        assert method_class(name).paper, name
        assert OmegaConf.load(CONF / "method" / f"{name}.yaml")._target_
