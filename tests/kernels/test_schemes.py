"""Options of the schemes that store entries packed."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.kernels.qjl import QJL
from kvbench.kernels.quantize import Quantization, SchemeError
from kvbench.kernels.turboquant import TurboQuant
from kvbench.kv import KVError
from kvbench.methods import build_method

Schemes = type[Quantization] | type[QJL] | type[TurboQuant]
REFUSED: list[tuple[Schemes, dict[str, Any], str]] = [
    (Quantization, {"bits": 3}, "bits is 3; allowed: 2 or 4"),
    (QJL, {"m": 12}, "m is 12; allowed: a multiple of 8"),
    (QJL, {"m_out": 0}, "m_out is 0; allowed: at least 8 where outliers > 0"),
    (QJL, {"m_out": 264}, "m_out is 264; allowed: at most m, 256"),
    (QJL, {"first_m_out": 520}, "first_m_out is 520; allowed: at most first_m, 512"),
    (QJL, {"outliers": 256}, "outliers is 256; allowed: less than or equal to 255"),
    (QJL, {"buffer": 100}, "buffer is 100; allowed: a multiple of group, 32"),
    (TurboQuant, {"bits": 6}, "bits is 6; allowed: less than or equal to 5"),
    (TurboQuant, {"outlier_share": 1.0}, "outlier_share is 1.0; allowed: less than 1"),
]
"""A scheme, options that it does not allow, and the message without the word that comes first."""


@pytest.mark.parametrize(("scheme", "options", "message"), REFUSED)
def test_wrong_options_are_refused(scheme: Schemes, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemeError) as refusal:
        scheme(**options)
    assert str(refusal.value) == f"quantize.{message}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "qjll"}, "quantize.scheme is 'qjll' (did you mean 'qjl'?)"),
        ({"scheme": "qjl", "mm": 8}, "quantize has no option 'mm' (did you mean 'm'?)"),
        ({"scheme": "qjl", "m": 12}, "quantize.m is 12; allowed: a multiple of 8"),
        (
            {"scheme": "turboquant", "bits": 6},
            "quantize.bits is 6; allowed: less than or equal to 5",
        ),
        ({"bits": "4"}, "quantize.bits is '4'; allowed: 2 or 4"),
    ],
)
def test_a_method_names_the_option_of_its_scheme(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KVError) as refusal:
        build_method("snapkv", quantize=options).quantization()
    assert str(refusal.value).startswith(f"snapkv.{message}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("scheme", "by_entry"),
    [
        (Quantization(keys="entry"), True),
        (TurboQuant(), True),
        (Quantization(), False),
        (QJL(), False),
        (TurboQuant(buffer=8), False),
    ],
    ids=str,
)
def test_entries_may_leave_where_they_are_packed_one_by_one(scheme: Any, by_entry: bool) -> None:
    assert scheme.by_entry is by_entry
    assert TurboQuant(bits=1, outlier_bits=5).outlier_bits == 5, "the smallest and the largest"
    assert QJL(m_out=0, first_m_out=0, outliers=0, group=1, buffer=1).m_out == 0
