"""A compressed context in a file: loaded by another process, and by nobody's leave but a right one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.tiny import Everything, prompt_ids, tiny_model
from support.variants import VARIANTS, label

from kvbench import compress
from kvbench.kv import KVError

SMALL: dict[str, Any] = {"sink": 4, "window": 4}
CONTEXT, QUESTION = prompt_ids(120), prompt_ids(90)[60:]
QUANTIZED: dict[str, Any] = {"quantize": {"bits": 4, "group_size": 16}}
BY_ENTRY: dict[str, Any] = {"quantize": {"bits": 4, "group_size": 16, "keys": "entry"}}
MORE: list[tuple[str, dict[str, Any]]] = [
    ("uniform", QUANTIZED),
    ("snapkv", BY_ENTRY),
    ("h2o", BY_ENTRY),
    ("balancekv", {"block_size": 16, **QUANTIZED}),
    ("balancekv_streaming", {"on_fail": "restart"}),
    ("subgen_streaming", {}),
]


@dataclass(frozen=True, kw_only=True)
class Unwritable(Everything):
    thing: object = re.compile("x")


def quiet(architecture: str = "llama", **options: Any) -> Any:
    model = tiny_model(architecture, **options)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("variant", [*VARIANTS, *MORE], ids=label)
def test_a_loaded_context_answers_as_the_saved_one(
    variant: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    name, options = variant
    file = tmp_path / "context.safetensors"
    with compress(quiet(), name, **SMALL, **options) as session:
        saved = session.read(CONTEXT)
        saved.save(file)
        expected = saved.ask(QUESTION, max_new_tokens=5)
        loaded = session.load(file)
        assert loaded.cache_bytes == saved.cache_bytes
        assert (loaded.ratio, loaded.entries) == (saved.ratio, saved.entries)
        assert loaded.ask(QUESTION, max_new_tokens=5) == expected
        assert loaded.chat([QUESTION], max_new_tokens=3) == saved.chat([QUESTION], max_new_tokens=3)
        loaded.save(file)  # with a turn that stayed
        again = session.load(file)
        assert again.token_ids == saved.token_ids
        assert again.ask(QUESTION, max_new_tokens=5) == saved.ask(QUESTION, max_new_tokens=5)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("method", ["snapkv", "h2o"])
def test_entries_packed_in_several_blocks_are_saved(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of a conversation are a block of their own, beside a first one that is full."""
    monkeypatch.setattr("kvbench.kernels.quantize.MERGED", 8)
    with compress(quiet(), method, **SMALL, **BY_ENTRY) as session:
        saved = session.read(CONTEXT)
        saved.chat([QUESTION], max_new_tokens=5)
        saved.save(tmp_path / "c")
        loaded = session.load(tmp_path / "c")
        assert loaded.token_ids == saved.token_ids
        assert loaded.ask(QUESTION, max_new_tokens=5) == saved.ask(QUESTION, max_new_tokens=5)


def test_sliding_windows_and_bfloat16_are_saved(tmp_path: Path) -> None:
    model = quiet("gemma2").to(torch.bfloat16)
    with compress(model, "snapkv", **SMALL) as session:
        context = session.read(CONTEXT)
        context.save(tmp_path / "c")
        loaded = session.load(tmp_path / "c")
        assert loaded.ask(QUESTION, max_new_tokens=5) == context.ask(QUESTION, max_new_tokens=5)
    other = compress(model.float(), "snapkv", **SMALL)
    with other as session, pytest.raises(KVError, match="or of it in another dtype"):
        session.load(tmp_path / "c")


def test_another_process_goes_on(tmp_path: Path) -> None:
    with compress(quiet(), "balancekv", **SMALL) as session:
        context = session.read(CONTEXT)
        context.save(tmp_path / "c")
        expected = context.ask(QUESTION, max_new_tokens=5)
    code = f"""
from support.tiny import tiny_model
from kvbench import compress
with compress(tiny_model("llama"), "balancekv", sink=4, window=4) as session:
    print(session.load({str(tmp_path / "c")!r}).ask({QUESTION}, max_new_tokens=5))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_a_wrong_model_method_or_budget_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "c"
    with compress(quiet(), "snapkv", **SMALL) as session:
        session.read(CONTEXT).save(file)
        with pytest.raises(KVError, match=r"context cannot be saved: .*No such file"):
            session.read(CONTEXT).save(tmp_path / "nowhere" / "c")
        session.method = Unwritable()
        with pytest.raises(KVError, match="Unwritable has an option that no file can hold"):
            session.read(CONTEXT).save(file)
    for model, method, options, said in (
        (quiet(seed=1), "snapkv", SMALL, "a context of another model than LlamaForCausalLM"),
        (quiet("qwen2"), "snapkv", SMALL, "a context of another model than Qwen2ForCausalLM"),
        (
            quiet(),
            "h2o",
            SMALL,
            r"whose method is kvbench.methods.snapkv.SnapKV; allowed here: .*H2O",
        ),
        (quiet(), "snapkv", {**SMALL, "kernel_size": 3}, "whose options is .*'kernel_size'"),
        (quiet(), "snapkv", {**SMALL, "rate": 0.5}, "whose budget is .*'rate': 0.25"),
    ):
        with compress(model, method, **options) as session:
            with pytest.raises(KVError, match=said) as error:
                session.load(file)
            assert "\n" not in str(error.value)


def test_a_file_from_elsewhere_harms_nobody(tmp_path: Path) -> None:
    file, forged = tmp_path / "c", tmp_path / "forged"
    with compress(quiet(), "balancekv", **SMALL, block_size=16) as session:
        session.read(CONTEXT).save(file)
        with safe_open(file, "pt") as opened:
            known = json.loads(opened.metadata()["kvbench"])
        tensors = load_file(file)

        def refused(said: str, **changes: Any) -> None:
            parts = {**tensors, **changes.pop("tensors", {})}
            parts = {name: x.contiguous() for name, x in parts.items() if x is not None}
            layers = json.loads(json.dumps(known["layers"]))
            layers["1"] |= changes.pop("layer", {})
            meta = {**known, "layers": layers, **changes}
            save_file(parts, forged, {"kvbench": json.dumps(meta)})
            with pytest.raises(KVError, match=said) as error:
                session.load(forged)
            assert "\n" not in str(error.value)

        keys, values = tensors["1.keys"], tensors["1.values"]
        positions, weights = tensors["1.positions"], tensors["1.log_weights"]
        foreign = "is no context that kvbench saved"
        for part in (
            {"1.keys": keys[:, 1:]},
            {"1.keys": keys[:1]},
            {"1.keys": keys.half()},
            {"1.keys": keys * float("nan")},
            {"1.values": values[..., 1:]},
            {"1.values": None},
            {"1.positions": positions + 120},
            {"1.positions": positions - 130},
            {"1.positions": positions.int()},
            {"1.log_weights": weights + float("nan")},
            {"1.log_weights": weights + float("inf")},
            {"token_ids": torch.full((120,), 97)},
            {"token_ids": torch.zeros(7, dtype=torch.int64)},
            {"token_ids": torch.zeros(3, 40, dtype=torch.int64)},
        ):
            refused(foreign, tensors=part)
        for layer in (
            {"length": 10**9},
            {"length": -1},
            {"first": 3},
            {"keys_only": 5},
            {"capacity": "many"},
            {"prompt_entries": [1, 2, 3]},
            {"prompt_entries": [10**30, 1]},
            {"prompt_entries": []},
            {"prompt_entries": None},
        ):
            refused(foreign, layer=layer)
        refused(foreign, layers={})
        refused(foreign, appended=10**6)
        refused(foreign, compressed_tokens=0)
        refused(foreign, exact_bytes=0)
        refused(foreign, messages=[1])
        refused(foreign, seed="0")
        refused("has format 2; allowed: 1", format=2)
        refused("whose method is os.system; allowed here", method="os.system")
        grown = {
            f"1.{name}": torch.cat([tensors[f"1.{name}"]] * 2, 1)
            for name in ("keys", "values", "positions", "log_weights")
        }
        refused(foreign, tensors=grown, layer={"length": 2 * keys.shape[1]})
        for content in (b"", b"\x80\x04N.", b"\xff" * 64, file.read_bytes()[:-100]):
            forged.write_bytes(content)
            with pytest.raises(KVError, match=foreign):
                session.load(forged)
        save_file({"x": torch.zeros(1)}, forged)
        with pytest.raises(KVError, match=foreign):
            session.load(forged)
        save_file({"x": torch.zeros(1)}, forged, {"kvbench": "[" * 100_000})
        with pytest.raises(KVError, match=foreign):
            session.load(forged)
        for missing in (tmp_path / "none", tmp_path):
            with pytest.raises(KVError, match="context cannot be loaded: "):
                session.load(missing)
