"""Drawn tokens: their distribution, what they depend on, and answers of many tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvbench.engine.answer import GREEDY, Sampling
from kvbench.kv import KVError


def shares(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """Brute force: the probability of each token after temperature and top-p."""
    weights = np.exp((logits - logits.max()) / temperature)
    weights /= weights.sum()
    kept, total = np.zeros_like(weights), 0.0
    for token in np.argsort(-weights, kind="stable"):
        if total >= top_p:
            break
        kept[token] = weights[token]
        total += weights[token]
    return np.asarray(kept / kept.sum())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4, 0.01])
def test_tokens_are_drawn_with_their_probabilities(temperature: float, top_p: float) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3))
    logits[4] = float("-inf")
    count = 20_000
    uniforms = (torch.arange(count) + 0.5) / count
    tokens, sound = Sampling(temperature, top_p).pick(logits.expand(count, -1), uniforms)
    found = np.bincount(tokens.numpy(), minlength=12) / count
    assert np.abs(found - shares(logits.double().numpy(), temperature, top_p)).max() < 2 / count
    assert bool(sound.all())
    assert found[4] == 0


def test_draws_depend_on_seed_example_sample_and_nothing_else() -> None:
    warm = Sampling(temperature=1.0)
    draws = warm.uniforms(0, "e", 0, 40)
    assert draws is not None
    assert torch.equal(draws[:8], warm.uniforms(0, "e", 0, 8))  # type: ignore[arg-type]
    for other in ((1, "e", 0), (0, "f", 0), (0, "e", 1)):
        assert not torch.equal(draws, warm.uniforms(*other, 40))  # type: ignore[arg-type]
    assert bool(((draws >= 0) & (draws < 1)).all())
    logits = torch.randn(5, 50)
    rows = warm.pick(logits, draws[:5])
    for row in range(5):
        alone = warm.pick(logits[row : row + 1], draws[row : row + 1])
        assert torch.equal(alone[:, 0], rows[:, row])


def test_the_edges() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [float("nan"), 0.0, 1.0], [2.0, float("inf"), 0.0]])
    largest = torch.full((3,), 1 - 2**-24)
    assert GREEDY.uniforms(0, "e", 0, 4) is None
    assert GREEDY.pick(logits, None)[0, 0] == 1
    tokens, sound = Sampling(1.0).pick(logits, largest)
    assert sound.tolist() == [1, 0, 0]
    assert tokens[0] == 0
    assert Sampling(1.0).pick(logits, torch.zeros(3))[0, 0] == 1
    for cold in (Sampling(1e-30), Sampling(5.0, 1e-9)):  # one token left
        assert cold.pick(torch.tensor([[1.0, 3.0, 2.0]]), largest[:1])[0, 0] == 1
    # each token has [below, below + probability): equal ones in the order of the vocabulary
    draws = torch.tensor([0.0, 0.249, 0.25, 0.5, 0.75, 1 - 2**-24])
    tokens, _ = Sampling(1.0).pick(torch.zeros(6, 4), draws)
    assert tokens.tolist() == [0, 0, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"temperature": -0.1},
            "sampling.temperature is -0.1; allowed: greater than or equal to 0",
        ),
        ({"temperature": float("nan")}, "sampling.temperature is nan"),
        ({"top_p": 0}, r"sampling.top_p is 0; allowed: greater than 0"),
        ({"samples": 0}, "sampling.samples is 0; allowed: greater than or equal to 1"),
        ({"samples": 4}, "samples is 4 and sampling.temperature 0, which gives the same answer"),
    ],
)
def test_what_is_not_allowed(options: dict[str, float], said: str) -> None:
    with pytest.raises(KVError, match=said):
        Sampling(**options)  # type: ignore[arg-type]
