"""RULER's strings, read from conf/task/_ruler_templates.yaml and refused if a byte of them differs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from kvbench.tasks.base import TaskError

CONTEXT = "{context}"
PINNED = {
    "needle": "8b1728a938426e426c307f6c79fc57662c827cb42865cd1630410cd7009cf524",
    "noise": "c2fcf70de6081e6fb364c3e5e9a7c0a335a05837a0832ae7a33a1cfe7414bd09",
    "document": "ce8bd2851618becfb57dffd626111f577bb4ba0d18e5704dcedcddd227c66098",
    "niah.template": "b373c00e238df12bea974d3fdc4ffebcc0f04600885640250040e3c27169216f",
    "niah.answer_prefix": "994f3a46e763414f630c39b097b66c4df6160ef1c5991817cfabee7bfee4ec19",
    "vt.template": "fcfaf2eab2bc3e35a119b13fe42e5902800291c4d6101c60be93ecf8b031fefa",
    "vt.answer_prefix": "4a4e9010ec4141a3706929569612af94bd4098ee660862395a73b0100e52c5a6",
    "cwe.template": "45fff5d17627b65ac12c8bf0e60380cbb05966878794a18ec394c2df9bea19b1",
    "cwe.answer_prefix": "8ee526599bbc73726f19bb07da106d143a194667cf52e08434c44ce652e08028",
    "fwe.template": "a0c7b873cf500d6ce65950a91baecd810ce34d151939da916a43fa5014178f9c",
    "fwe.answer_prefix": "9a72271c5762c96d9adbf480f21e621c5855e48cc029605c1c422135c4db7a92",
    "qa.template": "18a659c9723f24f172004ab1692ae88efaf0c07417b6d7326f813c7169011d28",
    "qa.answer_prefix": "255204f061d7e266f2aa1e50df08977c15a9c31b4cd8f3fbef0f96da93d564aa",
}
"""sha256 of each string's UTF-8 bytes in RULER at c3f5e3b4."""


@dataclass(frozen=True)
class Prompt:
    """The strings of one generator.

    Attributes:
        before, after: the template's text before and after the context.
        prefix: how the answer begins; it stands behind the assistant's header of a chat template.
        new_tokens: limit of an answer.
    """

    before: str
    after: str
    prefix: str
    new_tokens: int

    def singular(self) -> Prompt:
        """The strings about one key with one value; the order of the replacements is RULER's."""
        return self._each(_singular)

    def filled(self, **fields: str) -> Prompt:
        """The strings with their fields filled in."""
        return self._each(lambda text: text.format(**fields))

    def _each(self, change: Callable[[str], str]) -> Prompt:
        return Prompt(change(self.before), change(self.after), change(self.prefix), self.new_tokens)


def _singular(text: str) -> str:
    for several, one in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        text = text.replace(several, one)
    return text


@cache
def strings() -> Mapping[str, str]:
    """RULER's strings by the names of `PINNED`.

    Raises:
        TaskError: one is not RULER's.
    """
    found = {}
    for name, expected in PINNED.items():
        group, _, part = name.partition(".")
        text = str(_file()[group][part] if part else _file()[group])
        if hashlib.sha256(text.encode()).hexdigest() != expected:
            raise TaskError(
                f"ruler: {name} of conf/task/_ruler_templates.yaml is {text[:40]!r}..., which is not "
                f"RULER's; allowed: the text whose sha256 is {expected}"
            )
        found[name] = text
    return found


def prompt_of(generator: str) -> Prompt:
    """The strings of a generator (``niah``, ``qa`` ...)."""
    before, _, after = strings()[f"{generator}.template"].partition(CONTEXT)
    prefix = strings()[f"{generator}.answer_prefix"]
    return Prompt(before, after, prefix, int(_file()[generator]["new_tokens"]))


@cache
def _file() -> Any:
    file = files("kvbench") / "conf" / "task" / "_ruler_templates.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))
