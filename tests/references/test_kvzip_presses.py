"""KVzip, KVzip+ and KVgrad against the package's own presses, on tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from support.tiny import GROUPED, prompt_ids
from torch import Tensor

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.kept import entries_of
from kvbench.engine.prefill import prefill
from kvbench.engine.row import Row
from kvbench.kv import Budget
from kvbench.methods import build_method
from kvbench.prompts import PromptEncoder

kvpress = pytest.importorskip("kvpress", reason="needs the package kvpress: make test-references")

SINK, CHUNK, BEFORE, AFTER = 4, 64, "<us>", "</s><as>"
"""The package repeats what follows the chat template's beginning, kvbench what follows the sink."""

CONFIGS = {
    "llama": lambda **options: t.LlamaConfig(**options),
    "mistral": lambda **options: t.MistralConfig(**options, sliding_window=None),
    "phi3": lambda **options: t.Phi3Config(**options, sliding_window=None),
    "qwen3": lambda **options: t.Qwen3Config(**options, head_dim=16),
}
METHODS = {
    "kvzip": ("KVzipPress", {}),
    "kvzip_plus": ("KVzipPress", {"kvzip_plus_normalization": True}),
    "kvgrad": ("KVgradPress", {}),
}


class Characters:
    """A tokenizer with a chat template, each character a token. Blanks at the end are none, since the
    package's instruction before later chunks ends without the authors' blank."""

    chat_template = "there is one"

    def encode(self, text: str, return_tensors: str | None = None, **_: Any) -> Any:
        ids = [3 + ord(character) % 94 for character in text.rstrip(" ")]
        return torch.tensor([ids]) if return_tensors else ids

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return f"{BEFORE}{messages[0]['content']}{AFTER}"


def scored_by_the_package(
    model: Any, ids: list[int], press: str, options: dict[str, Any], ratio: float
) -> tuple[Tensor, list[Any]]:
    """Scores [layers, kv_heads, n], and of each layer what the press masks: heads and positions."""
    found = []

    class Noting(getattr(kvpress, press)):  # type: ignore[misc]
        def compress_post(self, model: Any) -> None:
            found.append(self.score_val[:, 0].clone())
            super().compress_post(model)

    with Noting(compression_ratio=ratio, chunk_size=CHUNK, n_sink=SINK, **options)(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=t.DynamicCache())
    masked = []
    for layer in model.model.layers:
        masked.append(layer.self_attn.masked_key_indices[1:])
        layer.self_attn.masked_key_indices = None
    return found[0], masked


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("name", METHODS)
def test_scores_and_what_is_kept_are_those_of_the_packages_press(
    architecture: str, name: str, monkeypatch: Any
) -> None:
    torch.manual_seed(0)
    config = CONFIGS[architecture](**{**GROUPED, "initializer_range": 0.1})
    model: Any = t.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ids, n = prompt_ids(170), 170
    budget = Budget(rate=0.3, sink=SINK, window=0)
    encoder = PromptEncoder(Characters(), suffix_ids=tuple(Characters().encode(AFTER)))  # type: ignore[arg-type]
    row = Row("x", build_method(name, chunk=CHUNK), budget, 0, "x")
    with kvbench_attention_on(model):
        prefill(model, ids, [row], encoder=encoder)
    assert row.failure is None, row.failure

    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    held = layers * heads * (SINK + budget.middle_kept(n)) - 1  # strictly above the threshold
    ratio = 1 - (held - 0.5) / (layers * heads * n)
    monkeypatch.setattr(t.AutoTokenizer, "from_pretrained", lambda *_, **__: Characters())
    scores, masked = scored_by_the_package(model, ids, *METHODS[name], ratio)
    expected = torch.ones(layers, heads, n, dtype=torch.bool)
    for layer, (head, position) in enumerate(masked):
        expected[layer, head, position] = False
    assert int(expected.sum()) == held

    differ = []
    for layer, (_, positions, _) in enumerate(entries_of(row, range(layers))):
        ours, theirs = row.carried[f"scores {layer}"][0], scores[layer, :, SINK:]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        stays = torch.zeros(heads, n + 1, dtype=torch.bool)
        stays.scatter_(1, positions % (n + 1), True)
        differ += scores[layer][stays[:, :n] != expected[layer]].tolist()
    if differ:  # ties at the threshold alone
        assert max(differ) <= min(differ) * (1 + 1e-5)
