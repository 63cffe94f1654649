"""Options of the schemes that store entries in few bits."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.kernels.quantize import Quantization


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bits": 3}, "bits is 3; allowed: bits 2 or 4"),
        ({"group_size": 0}, "group_size is 0; allowed: an integer >= 1"),
        ({"group_size": 1.5}, "group_size is 1.5; allowed: an integer >= 1"),
        ({"keys": "token"}, "keys is 'token'; allowed: channel, entry"),
    ],
)
def test_wrong_options_of_affine_quantisation_are_refused(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match="allowed") as refused:
        Quantization(**options)
    assert str(refused.value) == said


def test_the_smallest_options_are_taken() -> None:
    assert Quantization(group_size=1, bits=2).group_size == 1
    assert (Quantization(keys="entry").by_entry, Quantization().by_entry) == (True, False)
