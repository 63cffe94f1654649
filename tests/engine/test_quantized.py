"""Weights of few bits: what transformers' loaders make of them is the model less a known error, a run
says which weights it had, and what is missing or cannot be is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import main
from support.configs import composed
from support.tiny import prompt_ids, tiny_model

from kvbench.cli.build import build_job
from kvbench.engine import loading as quantized
from kvbench.engine.generate import run_forks
from kvbench.engine.loading import ModelError, ModelSpec, load_model, load_tokenizer
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods import build_method
from kvbench.records.read import load_runs
from kvbench.run.identity import without_defaults

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tiny_model("llama")


def load(folder: Path | str, **options: Any) -> Any:
    spec = ModelSpec(name="tiny", path=str(folder), **options)
    return load_model(spec, device=CPU, dtype=torch.float32)


def recall(**options: Any) -> Any:
    """The shipped model: bitsandbytes' kernels want rows of whole blocks."""
    return load("asset:recall_mini", **options)


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """[ids, vocabulary] float32, by transformers' own attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    model.set_attn_implementation(before)
    return found


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_a_gguf_file_is_the_model_it_was_written_from(tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the gguf package: pip install 'kvbench[quantized]'")
    from support.gguf_files import write_gguf

    write_gguf(tiny, tmp_path / "tiny-f32.gguf")
    model = load(tmp_path, quantization="gguf")
    assert torch.equal(logits(model, prompt_ids(40)), logits(tiny, prompt_ids(40)))
    tokenizer = load_tokenizer(ModelSpec(name="t", path=str(tmp_path), quantization="gguf"))
    assert tokenizer.decode(tokenizer.encode("hello you"), skip_special_tokens=True) == "hello you"
    assert tokenizer.eos_token_id == 2


def test_a_gguf_file_of_few_bits_is_read_as_the_format_says(tiny: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the gguf package")
    from support.gguf_files import write_gguf

    write_gguf(tiny, tmp_path / "tiny-q8.gguf", "Q8_0")
    write_gguf(tiny, tmp_path / "tiny-q4.gguf", "Q4_0")
    for name, kind in (("tiny-q8", "Q8_0"), ("tiny-q4", "Q4_0")):
        model = load(tmp_path, quantization="gguf", gguf_file=f"{name}.gguf")
        found = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
        written = tiny.model.layers[1].mlp.up_proj.weight.detach().numpy()
        quant = gguf.GGMLQuantizationType[kind]
        unpacked = gguf.quants.dequantize(gguf.quants.quantize(written, quant), quant)
        assert (found == unpacked).all()
        assert (found != written).any()
    with pytest.raises(ModelError, match=r"has 2 such .*=<one of: tiny-q4.gguf, tiny-q8.gguf>"):
        load(tmp_path, quantization="gguf")
    with pytest.raises(ModelError, match=r"no config.json but GGUF files; allowed: model.quant"):
        load(tmp_path)


@pytest.mark.parametrize(("name", "worst"), [("bnb8", 0.02), ("bnb4", 0.2)])
def test_bitsandbytes_packs_the_weights_while_they_are_read(name: str, worst: float) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="needs the bitsandbytes package")
    model, whole = recall(quantization=name), recall()
    layer = model.model.layers[1].mlp.up_proj
    assert isinstance(layer, {"bnb4": bnb.nn.Linear4bit, "bnb8": bnb.nn.Linear8bitLt}[name])
    assert layer.weight.element_size() == 1
    ids = prompt_ids(40)
    assert 0 < relative(logits(model, ids), logits(whole, ids)) < worst
    methods = {name: (build_method(name), Budget(rate=0.5)) for name in ("exact", "snapkv")}
    found = run_forks(model, ids[:30], ids[30:], methods, Stopping(4), seed=3, example_id="x")
    assert {(one.failure, len(one.tokens)) for one in found.values()} == {(None, 4)}


def test_nf4_is_as_far_from_the_weights_as_its_levels_allow() -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="needs the bitsandbytes package")
    packed = recall(quantization="bnb4").model.layers[1].mlp.up_proj.weight
    assert packed.quant_type == "nf4"
    unpacked = bnb.functional.dequantize_4bit(packed.data, packed.quant_state)
    written = recall().model.layers[1].mlp.up_proj.weight.detach()
    blocks = written.reshape(-1, packed.quant_state.blocksize)
    error = (unpacked - written).abs().reshape(blocks.shape).amax(1) / blocks.abs().amax(1)
    assert float(error.max()) < (1 - 0.6961928) / 2 + 1e-5  # half of the widest gap, 2305.14314 E


def test_a_run_says_which_weights_it_had(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("gguf", reason="needs the gguf package")
    from support.gguf_files import write_gguf

    (tmp_path / "packed").mkdir()
    write_gguf(recall(), tmp_path / "packed" / "recall.Q8_0.gguf", "Q8_0")
    words = [
        f"model={tmp_path / 'packed'}", "model.name=recall", "model.tokenizer=asset:recall_mini",
        "model.quantization=gguf", "model.gguf_file=recall.Q8_0.gguf", "task=longeval_lines",
        "task.num_lines=[20]", "method=[exact,snapkv]", "limit=2", "logger=none", "device=cpu",
        f"results_dir={tmp_path / 'runs'}", "experiment_name=packed",
    ]  # fmt: skip
    status, out, err = main(capsys, *words)
    assert status == 0, out + err
    (first, *_) = load_runs(tmp_path / "runs" / "packed")
    assert first.manifest["model"] == "recall-recall.Q8_0"
    assert first.manifest["identity"]["model"]["quantization"] == "gguf"
    assert "recall-recall.Q8_0" in (tmp_path / "runs" / "packed" / "report.html").read_text()
    assert first.records["score"].tolist() == [1.0, 1.0]  # the exact cache


def test_names_of_runs_of_before_stay_and_packed_weights_have_names_of_their_own() -> None:
    whole = build_job(composed("model=tiny_random")).identity("exact")
    model = dict(whole["model"])
    assert model.pop("quantization") is None
    assert model.pop("gguf_file") is None
    assert "quantization" not in without_defaults(whole)["model"]
    packed = {**whole, "model": {**whole["model"], "quantization": "bnb4"}}
    assert without_defaults(packed)["model"]["quantization"] == "bnb4"
    label = ModelSpec(name="m", path="p", quantization="bnb4").label
    assert (label, ModelSpec(name="m", path="p").label) == ("m-bnb4", "m")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "bnb3"}, "allowed: bnb4 . bnb8 . gguf"),
        ({"gguf_file": "x.gguf"}, "allowed: model.quantization=gguf"),
        ({"quantization": "bnb4", "random_weights": True}, "allowed: null, since only weights"),
    ],
)
def test_options_that_cannot_be_are_one_line(options: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec(name="m", path="p", **options)


@pytest.mark.parametrize("name", ["bnb4", "bnb8", "gguf"])
def test_a_package_that_is_missing_is_one_line(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda package: None)
    with pytest.raises(ModelError) as caught:
        recall(quantization=name)
    wanted = (
        f"{quantized.PACKAGES[name]} is not installed; allowed: pip install 'kvbench[quantized]'"
    )
    assert str(caught.value) == f"model.quantization is {name}: {wanted}"


def test_a_device_without_kernels_is_one_line() -> None:
    spec = ModelSpec(name="m", path="p", quantization="bnb8")
    pytest.importorskip("bitsandbytes", reason="needs the bitsandbytes package")
    with pytest.raises(ModelError, match="device is 'mps', for which bitsandbytes has no kernels"):
        quantized._packing(spec, torch.device("mps"), torch.float32)
