"""LongBench's prompt templates, taken from lm-eval's task files and restored to the originals.

lm-eval's copies call the field ``question`` instead of ``input``, lost the blank line before it in two
few-shot datasets, and lost white space at the end of four. Every restored template must have the
sha256 of the original (``LongBench/config/dataset2prompt.json`` of github.com/THUDM/LongBench at
2e00731f); otherwise the task stops.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from kvbench.errors import needs_extra
from kvbench.tasks.base import TaskError

CONTEXT, INPUT = "{context}", "{input}"

_MULTI_HOP = "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb"
PINNED: dict[str, tuple[str, int]] = {
    "narrativeqa": ("aada7ed24b06abace5b0045ac3bcfe06fc831a6cf434f0ecfd99fb7b3d299e1c", 128),
    "qasper": ("0fbdd123fe7f83d6d6a9c583ca28cb29d68e523bf8fec01a0cf2dcd11037775d", 128),
    "multifieldqa_en": ("20b4666a2de8a1f701bdb6c4e015fa9f8758d64b361d841f7766df6c9ceba770", 64),
    "multifieldqa_zh": ("344b3a4e557cd5470c661b3d6b374339717e1257a6c01f628d22322d4a554b94", 64),
    "hotpotqa": (_MULTI_HOP, 32),
    "2wikimqa": (_MULTI_HOP, 32),
    "musique": (_MULTI_HOP, 32),
    "dureader": ("ae53329f51b17908e08b8c6bf366987282b8b38c0ee35275ebd7b79e9b30eff2", 128),
    "gov_report": ("91c25d585b189ced91c9280efcb4ecb5dcff9548cd4e3bfae66c68025b569e95", 512),
    "qmsum": ("dca23b678fe0183bbd9555b57947022aed1b85739da5ad7e1b4708dd0c71c409", 512),
    "multi_news": ("2af3f28c40b902e6535d4910510d51653613c49de9b2fc287c5958395061101d", 512),
    "vcsum": ("3e5d8241bc9b512eb4929c1ba80882a44f50b446bc2b1d9d79eff030dd10dc27", 512),
    "trec": ("0eff8bebdba99d91e9d7d91b6ab39455ac74648bea92c9255c9f68c62175b2db", 64),
    "triviaqa": ("00a802e6377e72fca39b169cf6c28893bedf23ba7286b03ecd15867c3e27a7c4", 32),
    "samsum": ("a68d884234907eefcaa0eacf7b2997f60fa46603988dceae6a44f9b49f045b3f", 128),
    "lsht": ("f3edabdf7fae53d6cadfa7a10f3574d114302161c46dacecd5d30763204bbbf3", 64),
    "passage_count": ("986550b6c61009c629a4535766d94b7b51e2b2b9e1ed169e4ecb54417466e964", 32),
    "passage_retrieval_en": (
        "39b96b7fa52bdd2aa2bde34ea199158505201b9a0a2c3ce94e80249293f60431",
        32,
    ),
    "passage_retrieval_zh": (
        "c1e2346e245eb365bc33a1503cde2e473948a2aad51c3e4c72893e61ab074d60",
        32,
    ),
    "lcc": ("6a1f24cf0bb83cd90f1fca8f0dd24801626c2aaea29db834ddc83b950e71190e", 64),
    "repobench-p": ("ee9ec182ea5ffeb70a7140d55baea97264a8612d88226d323afa90859c36240c", 64),
}
"""sha256 of the original template's UTF-8 bytes, and the limit of new tokens, per dataset."""

_LOST_END = {"passage_count": " ", "passage_retrieval_en": " ", "lcc": "\n", "repobench-p": "\n"}
_LOST_BLANK_LINE = frozenset(("triviaqa", "samsum"))


class _Loader(yaml.SafeLoader):
    """YAML whose tags (lm-eval's ``!function``) are read as plain text."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))


def max_new_tokens(dataset: str) -> int:
    """LongBench's limit of new tokens.

    Raises:
        TaskError: an unknown dataset.
    """
    return _pinned(dataset)[1]


@cache
def prompt_template(dataset: str) -> str:
    """LongBench's template, with the fields ``{context}`` and ``{input}``.

    Raises:
        TaskError: an unknown dataset; a template of the installed lm-eval that cannot be restored.
    """
    expected, _ = _pinned(dataset)
    template = _template_of_lm_eval(dataset)
    restored = template
    if dataset in _LOST_BLANK_LINE:
        restored = restored.replace(f"{CONTEXT}\n{INPUT}", f"{CONTEXT}\n\n{INPUT}")
    restored += _LOST_END.get(dataset, "")
    for candidate in (restored, template):
        if hashlib.sha256(candidate.encode()).hexdigest() == expected:
            return candidate
    raise TaskError(
        f"longbench: the template of {dataset} in the installed lm-eval is not LongBench's "
        f"(sha256 of the restored one {hashlib.sha256(restored.encode()).hexdigest()[:16]}..., "
        f"expected {expected[:16]}...); allowed: lm-eval 0.4.13"
    )


def _pinned(dataset: str) -> tuple[str, int]:
    if dataset not in PINNED:
        raise TaskError(f"longbench: dataset {dataset!r} unknown; allowed: {', '.join(PINNED)}")
    return PINNED[dataset]


def _template_of_lm_eval(dataset: str) -> str:
    """The template as lm-eval has it, its fields renamed."""
    try:
        file = files("lm_eval") / "tasks" / "longbench" / f"{dataset}.yaml"
    except ModuleNotFoundError as error:
        raise TaskError(f"longbench: {needs_extra('lm-eval', 'lm-eval')}") from error
    try:
        task: Any = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
        template = task["doc_to_text"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as problem:
        raise TaskError(
            f"longbench: the installed lm-eval has no template of {dataset} "
            f"({type(problem).__name__}); allowed: lm-eval 0.4.13"
        ) from problem
    return str(template).replace("{{context}}", CONTEXT).replace("{{question}}", INPUT)


def fill(template: str, context: str, text: str) -> tuple[str, int]:
    """The prompt, and where in it the context ends (characters): what follows is the question."""
    before, _, after = template.partition(CONTEXT)
    head = before + context
    return head + after.replace(INPUT, text), len(head)
