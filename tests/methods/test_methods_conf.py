"""conf/method: every YAML composes to the constructor call of one method, with every option in it."""

from __future__ import annotations

import dataclasses

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from support.command import composed
from support.variants import OTHERS, VARIANTS

from kvbench.catalogue import describe, files_of
from kvbench.methods import available_methods, build_method, method_class
from kvbench.methods.base import Method, TokenScoringMethod
from kvbench.methods.snapkv import SnapKV

LISTED = {name for name, _ in (*VARIANTS, *OTHERS)}
"""Methods that ship; one that is added needs its two files alone."""
FILES = files_of("methods")


def test_yaml_is_the_method_with_its_defaults():
    """``snapkv`` or ``<method>_<preset>``; of a package that is not installed, up to its making."""
    methods = composed(f"method=[{','.join(FILES)}]").methods
    assert sorted(methods) == list(FILES)
    for label, node in methods.items():
        name = max((n for n in available_methods() if f"{label}_".startswith(f"{n}_")), key=len)
        options = {str(key) for key in node} - {"_target_"}
        fields = {field.name for field in dataclasses.fields(method_class(name))}
        assert options | {"quantize"} == fields, label  # quantize is every method's
        text = FILES[label].read_text().splitlines()
        assert text[0] == f"# @package methods.{label}"
        assert text[1].startswith("# ") or name not in LISTED, label
        try:
            made = instantiate(node, _convert_="all")
        except InstantiationException as failure:
            if "needs the package" in str(failure):
                continue
            raise
        assert made == build_method(name, label.removeprefix(name).lstrip("_") or None)


def test_every_method_names_its_paper_and_has_a_yaml_as_has_every_preset():
    for name in available_methods():
        assert method_class(name).paper or name not in LISTED, name
        assert {name, *(f"{name}_{preset}" for preset in method_class(name).presets)} <= set(FILES)


@pytest.mark.parametrize(
    ("base", "present", "missing"),
    [(Method, {}, "compress"), (TokenScoringMethod, {"compress": SnapKV.compress}, "token_scores")],
)
def test_a_method_without_what_it_must_implement_cannot_be_made(base, present, missing):
    incomplete = type("Incomplete", (base,), present)
    with pytest.raises(TypeError, match=f"abstract.* '?{missing}"):
        incomplete()


def test_a_yaml_without_a_comment_is_told_by_its_classs_docstring(tmp_path, monkeypatch):
    """One's own is not imported for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        'raise ImportError\nclass KNorm:\n    """Keeps the keys\n    of smallest norm. And so on."""\n'
    )
    told = {
        "own.KNorm": "Keeps the keys of smallest norm",
        "own.Other": "",
        "nowhere.KNorm": "",
        "KNorm": "",
    }
    for target, expected in told.items():
        path = tmp_path / "mine.yaml"
        path.write_text(f"# @package methods.mine\n_target_: {target}\n")
        assert describe(path) == expected
