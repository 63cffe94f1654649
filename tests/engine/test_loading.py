"""Loading models and tokenizers: what is refused and how, packed weights, weights on several devices.

Without a GPU the second device is the disk: accelerate brings a layer's weights in as the layer is
needed. Between two passes they are nowhere (on "meta"), so nothing may ask the model where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from support.asking import generate_one
from support.encoders import tokenizer as with_template
from support.kernels import relative
from support.tiny import on_kvbench, prompt_ids, tiny_model
from transformers import AutoTokenizer

from kvbench.engine import model as loading
from kvbench.engine.answer import Stopping
from kvbench.engine.attention import UnsupportedModel
from kvbench.engine.device import input_device
from kvbench.engine.model import (
    ModelError,
    ModelSpec,
    check_config_class,
    end_token_ids,
    load_model,
    load_tokenizer,
    local_path,
    prompt_encoder,
    resolve_device,
    resolve_dtype,
)
from kvbench.kv import Budget
from kvbench.methods import build_method
from kvbench.prompts import Thought
from kvbench.run import session
from kvbench.tasks.encoding import encode_shared

RECALL = ModelSpec(name="recall_mini", path="asset:recall_mini")
CPU = torch.device("cpu")
SPREAD = ("exact", "balancekv", "h2o", "spatten")


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    return path


def load(folder: Path | str, **options: Any) -> Any:
    spec = ModelSpec(name="tiny", path=str(folder), **options)
    model: Any = load_model(spec, device=CPU, dtype=torch.float32)
    return on_kvbench(model)


def recall(**options: Any) -> Any:
    return load("asset:recall_mini", **options)


def hub_error(kind: type[Exception], status: int) -> Exception:
    request = httpx.Request("GET", "https://hub.invalid/model")
    return kind("refused", response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(GatedRepoError, 403), "is gated: accept its licence on its Hub page, then set"),
        (hub_error(RepositoryNotFoundError, 404), "is not on the Hub, or is private"),
        (OSError("You are trying to access a gated repo.\nMore text."), "is gated: accept"),
        (OSError("cannot reach the Hub\nmore lines"), "cannot be loaded: cannot reach the Hub"),
        (ValueError("one of: \n(1) a file\n(2)"), "cannot be loaded: one of: (1) a file"),
    ],
)
def test_the_hubs_failures_are_one_line(monkeypatch, error, message):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelSpec(name="m", path="someone/model"))
    text = str(caught.value)
    assert "'someone/model'" in text
    assert message in text
    assert "\n" not in text


def spec(path: str = "p", **options: Any) -> Callable[[], Any]:
    return lambda: ModelSpec(name="m", path=path, **options)


def tokenizer(path: str, **options: Any) -> Callable[[], Any]:
    return lambda: prompt_encoder(load_tokenizer(spec(path)()), spec(path, **options)())


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (tokenizer("asset:nothing"), "does not ship with this package; allowed: asset:recall_mini"),
    (tokenizer("./nowhere"), "has no config.json; allowed: a folder with a model"),
    (tokenizer(RECALL.path, chat_template="always"), r"'always' and the tokenizer .* has none"),
    (tokenizer(RECALL.path, enable_thinking=True), r"enable_thinking is True and .* allowed: null"),
    (spec(chat_template="yes"), "allowed: auto, always, never"),
    (spec(quantization="bnb3"), "allowed: 'bnb4', 'bnb8' or 'gguf'"),
    (spec(gguf_file="x.gguf"), "allowed: model.quantization=gguf"),
    (spec(quantization="bnb4", random_weights=True), "allowed: null, since only weights"),
    (
        spec(random_weights=True, device_map="balanced"),
        "device_map is 'balanced' and model.random_weights is true",
    ),
    (lambda: load("asset:recall_mini", device_map="autu"), "cannot be loaded"),
    (
        lambda: load("asset:recall_mini", config={"max_seq_len": 8192}),
        "model.config names 'max_seq_len', which LlamaConfig does not have",
    ),
    (
        lambda: check_config_class(
            spec(config={"max_seq_len": 8192}, architecture={"model_type": "llama"})()
        ),
        "model.config names 'max_seq_len', which LlamaConfig does not have",
    ),
    (lambda: resolve_dtype("half", CPU), "dtype is 'half'; allowed: auto, float32"),
    (lambda: resolve_device("gpu"), "allowed: auto, cpu, mps, cuda, cuda:N"),
    (lambda: resolve_device("cuda:99"), r"'cuda:99'; this machine has \d+ GPUs"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_wrong_type_in_a_config_is_one_line_at_any_verbosity(caplog: Any) -> None:
    tiny = {"model_type": "llama", "num_attention_heads": -0.0}
    wrong = ModelSpec(name="m", path="p", random_weights=True, architecture=tiny)
    with caplog.at_level("DEBUG"), pytest.raises(ModelError, match=r"expected int.*-0\.0") as error:
        loading.load_config(wrong)
    assert "num_attention_heads" in str(error.value)
    assert "\n" not in str(error.value)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "roberta"},
            "both ways within its prompt, as is_decoder of its config is False",
        ),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "both ways"),
        ({"model_type": "llama4_text"}, "has chunked_attention layers"),
        ({"model_type": "mistral", "sliding_window": 8}, "has sliding_attention layers only"),
        ({"model_type": "bloom"}, "computes its attention itself"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_model_that_cannot_be_run_is_refused_by_its_config(
    fields: dict[str, Any], message: str
) -> None:
    spec = ModelSpec(name="m", path="p", random_weights=True, architecture=fields)
    with pytest.raises(UnsupportedModel, match=message) as error:
        loading.load_config(spec)
    assert "\n" not in str(error.value)


def test_a_base_model_gets_no_template_and_a_bos_where_its_tokenizer_puts_one():
    plain = tokenizer(RECALL.path)()
    assert not plain.prefix_ids + plain.suffix_ids

    class WithBos:
        chat_template = None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return ([1] if add_special_tokens else []) + [ord(c) for c in text]

    assert prompt_encoder(WithBos(), RECALL).prefix_ids == (1,)
    config, generation = SimpleNamespace(eos_token_id=9), SimpleNamespace(eos_token_id=[7, 8])
    model = SimpleNamespace(generation_config=generation, config=config)
    assert end_token_ids(model, SimpleNamespace(eos_token_id=3)) == {3, 7, 8, 9}


def test_a_chat_template_goes_around_the_prompt():
    template = (
        "{% for m in messages %}user: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}bot:{% endif %}"
    )
    encoder = prompt_encoder(with_template(template), RECALL)
    around = (encoder.decode(encoder.prefix_ids), encoder.decode(encoder.suffix_ids))
    assert around == ("user: ", "\nbot:")
    bare = prompt_encoder(with_template(template), spec("x", chat_template="never")())
    assert not bare.prefix_ids + bare.suffix_ids


OPENS, CLOSES = "<think>\n", "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("options", "generation", "thought"),
    [
        ({}, "", Thought("</think>", "<think>")),
        ({}, OPENS, Thought("</think>")),
        ({}, CLOSES, None),
        ({"answer_after": "never"}, OPENS, None),
        ({"answer_after": "FINAL:"}, "", Thought("FINAL:")),
        ({"answer_after": "</think>"}, CLOSES, None),
        ({"enable_thinking": False}, "", None),
        ({"enable_thinking": True}, "", Thought("</think>", "<think>")),
        ({"chat_template": "never"}, OPENS, None),
    ],
)
def test_a_thought_is_found_in_the_chat_template(
    options: Any, generation: str, thought: Thought | None
) -> None:
    template = (
        "{% for m in messages %}user: {{ m['content'].split('</think>')[-1] }}\n{% endfor %}"
        f"{{% if add_generation_prompt %}}bot:{generation}"
        f"{{% if enable_thinking is false %}}{CLOSES}{{% endif %}}{{% endif %}}"
    )
    encoder = prompt_encoder(with_template(template), spec("x", **options)())
    assert encoder.thought == thought
    _, (ids,) = encode_shared(encoder, "", [("What?", "Answer:")])
    assert encoder.decode(ids).endswith("Answer:") == (thought is None or bool(thought.start))


def test_an_end_of_thought_that_is_a_special_token_is_decoded() -> None:
    made = with_template(special=["[/THINK]"])
    encoder = prompt_encoder(made, spec("x", answer_after="[/THINK]")())
    text = encoder.decode(encoder.encode_text("line a[/THINK] 12"))
    assert encoder.thought is not None
    assert encoder.thought.split(text) == ("line a", "12")


def test_random_weights_need_no_download_and_follow_the_seed():
    spec = ModelSpec(
        name="r",
        path="never/fetched",
        random_weights=True,
        architecture={
            "model_type": "llama",
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    )
    state = torch.random.get_rng_state()
    first, again, other = (
        load_model(spec, device=CPU, dtype=torch.float32, seed=s).lm_head.weight for s in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state()), "the caller's generator is untouched"


def test_a_dtype_of_auto_follows_the_device_and_a_tilde_is_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert local_path("~/mine") == str(tmp_path / "mine")
    assert local_path("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


def test_weights_of_files_go_into_the_config_beside_them() -> None:
    architecture = {"model_type": "llama", "num_hidden_layers": 2}
    assert recall(architecture=architecture).config.to_dict() == recall().config.to_dict()


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    model.set_attn_implementation(before)
    return found


def test_a_gguf_file_is_read_as_the_format_says(tiny: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the gguf package: kvbench[quantized]")
    from support.gguf_files import write_gguf

    write_gguf(tiny, tmp_path / "tiny-f32.gguf")
    model = load(tmp_path, quantization="gguf")
    assert torch.equal(logits(model, prompt_ids(40)), logits(tiny, prompt_ids(40)))
    encoder = load_tokenizer(spec(str(tmp_path), quantization="gguf")())
    assert encoder.decode(encoder.encode("hello you"), skip_special_tokens=True) == "hello you"
    assert encoder.eos_token_id == 2
    load_tokenizer(spec(str(tmp_path), quantization="gguf", config={"eos_token_id": [2, 3]})())
    write_gguf(tiny, tmp_path / "tiny-q4.gguf", "Q4_0")
    model = load(tmp_path, quantization="gguf", gguf_file="tiny-q4.gguf")
    found = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    written = tiny.model.layers[1].mlp.up_proj.weight.detach().numpy()
    quant = gguf.GGMLQuantizationType.Q4_0
    unpacked = gguf.quants.dequantize(gguf.quants.quantize(written, quant), quant)
    assert (found == unpacked).all()
    assert (found != written).any()
    with pytest.raises(ModelError, match=r"has 2 such .*=<one of: tiny-f32.gguf, tiny-q4.gguf>"):
        load(tmp_path, quantization="gguf")
    with pytest.raises(ModelError, match=r"no config.json but GGUF files; allowed: model.quant"):
        load(tmp_path)


def test_folders_that_lack_a_part_are_refused_in_one_line(tmp_path: Path) -> None:
    """An adapter, a model that was saved without its tokenizer, a GGUF file in place of its folder."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with chdir(tmp_path), pytest.raises(ModelError, match=r"'adapter' has no config.json; allowed"):
        load("adapter")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(
        ModelError, match=r"model' has no tokenizer; allowed: model.tokenizer=<a fo"
    ):
        load_tokenizer(spec(str(tmp_path / "model"))())
    load_tokenizer(spec(str(tmp_path / "model"), tokenizer=RECALL.path)())
    with pytest.raises(
        ModelError, match=r"'a/b.gguf' is a file; .*=gguf and model.gguf_file=b.gguf"
    ):
        load("a/b.gguf")


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
    results = generate_one(model, ids[:30], ids[30:], methods, Stopping(4), seed=3, example_id="x")
    assert {(one.failure, len(one.tokens)) for one in results.values()} == {(None, 4)}


def halves(first: str, second: str) -> dict[str, str]:
    """A device map with the embedding and two of four layers on `first`, the rest on `second`."""
    layers = {f"model.layers.{i}": first if i < 2 else second for i in range(4)}
    ends = {"model.embed_tokens": first, "model.norm": second, "lm_head": second}
    return {**layers, **ends, "model.rotary_emb": first}


def answers(model: Any) -> dict[str, Any]:
    budget, ids = Budget(rate=0.25, sink=4, window=4), prompt_ids(96)
    methods = {name: (build_method(name), budget) for name in SPREAD}
    found = {}
    for after in ("prompt", "context"):
        here = generate_one(
            model, ids[:80], ids[80:], methods, Stopping(8), seed=3, example_id="x",
            compress_after=after,
        )  # fmt: skip
        found |= {(label, after): answer for label, answer in here.items()}
    assert all(one.failure is None for one in found.values())
    return {
        label: (one.tokens, one.cost.entries, one.cost.cache_bytes) for label, one in found.items()
    }


MAPS = {
    "cpu, then disk": {"device_map": halves("cpu", "disk")},
    "disk, then cpu": {"device_map": halves("disk", "cpu")},
    "auto": {"device_map": "auto", "max_memory": {"cpu": "300KB"}},
}


@pytest.mark.parametrize("placement", MAPS.values(), ids=MAPS)
def test_tokens_are_those_of_one_device(folder, placement):
    spread = load(folder, **placement)
    assert set(spread.hf_device_map.values()) == {"cpu", "disk"}
    assert any(weight.is_meta for weight in spread.parameters()), "nothing is offloaded"
    assert input_device(spread) == torch.device("cpu")
    expected = answers(load(folder))
    assert len({str(tokens) for tokens, *_ in expected.values()}) > 2, "methods must differ"
    assert answers(spread) == expected


def test_a_model_that_cannot_be_run_is_refused_before_its_tokenizer_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[ModelSpec] = []
    monkeypatch.setattr(session, "load_tokenizer", fetched.append)
    monkeypatch.setattr(session, "load_config", Mock(side_effect=ModelError("no such model")))
    with pytest.raises(ModelError, match="no such model"):
        _ = session.Session(RECALL, CPU, torch.float32).encoder
    assert not fetched
