"""Loading models and tokenizers: what is refused and how, prompts' surroundings, end tokens."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import httpx
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoTokenizer

from kvbench.engine import loading, memory
from kvbench.engine.loading import (
    ModelError,
    ModelSpec,
    end_token_ids,
    load_model,
    load_tokenizer,
    prompt_encoder,
    resolve_device,
    resolve_dtype,
)

RECALL = ModelSpec(name="recall_mini", path="asset:recall_mini")
CPU = torch.device("cpu")


def hub_error(kind, status):
    request = httpx.Request("GET", "https://hub.invalid/model")
    return kind("refused", response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(GatedRepoError, 403), "is gated: accept its licence on its Hub page, then set"),
        (hub_error(RepositoryNotFoundError, 404), "is not on the Hub, or is private"),
        (OSError("You are trying to access a gated repo.\nMore text."), "is gated: accept"),
        (OSError("cannot reach the Hub\nmore lines"), "cannot be loaded: cannot reach the Hub"),
    ],
)
def test_the_hubs_failures_are_one_line(monkeypatch, error, message):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelSpec(name="m", path="someone/model"))
    text = str(caught.value)
    assert "'someone/model'" in text
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("asset:nothing", "does not ship with this package; allowed: asset:recall_mini"),
        ("./nowhere", "has no config.json; allowed: a folder with a model"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(path, message):
    with pytest.raises(ModelError, match=message):
        load_tokenizer(ModelSpec(name="m", path=path))


def test_devices_and_dtypes():
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(ModelError, match="dtype is 'half'; allowed: auto, float32"):
        resolve_dtype("half", CPU)
    with pytest.raises(ModelError, match="allowed: auto, cpu, mps, cuda, cuda:N"):
        resolve_device("gpu")
    with pytest.raises(ModelError, match=r"'cuda:99'; this machine has \d+ GPUs"):
        resolve_device("cuda:99")


def test_mps_is_taken_where_torch_has_it(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(
        ModelError, match="'mps', which this torch does not have; allowed: auto, cpu"
    ):
        resolve_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_dtype("auto", resolve_device("mps")) == torch.float32


def test_a_gpu_that_auto_cannot_use_is_told_in_one_line(monkeypatch, caplog, tmp_path):
    def old_driver():
        warnings.warn(
            "The NVIDIA driver on your system is too old\n(found version 1).", stacklevel=1
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old_driver)
    monkeypatch.setattr(loading, "GPU_FILES", ())
    assert resolve_device("auto") == CPU
    (told,) = caplog.messages
    assert told == (
        "device is auto and becomes cpu, although there is a GPU: "
        "The NVIDIA driver on your system is too old"
    )
    caplog.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    assert not caplog.messages
    monkeypatch.setattr(loading, "GPU_FILES", (str(tmp_path),))
    assert resolve_device("auto") == CPU
    assert "this torch" in caplog.messages[0]


def test_memory_of_a_model_on_several_gpus_is_counted_on_all(monkeypatch):
    held = [5, 7, 0]
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda index: held[index])
    began = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", began.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(held))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100, 200))
    device = torch.device("cuda", 0)
    assert memory.reset_peak(device)
    assert began == [0, 1, 2]
    assert memory.peak_bytes(device) == memory.used_bytes(device) == 12
    assert memory.total_bytes(device) == 212  # not of a GPU that nothing is on


def test_a_base_model_gets_no_template_and_a_bos_where_its_tokenizer_puts_one():
    tokenizer = load_tokenizer(RECALL)
    encoder = prompt_encoder(tokenizer, RECALL)
    assert encoder.overhead == 0
    with pytest.raises(ModelError, match=r"'always' and the tokenizer .* has none"):
        prompt_encoder(tokenizer, ModelSpec(name="m", path="x", chat_template="always"))
    with pytest.raises(ModelError, match="allowed: auto, always, never"):
        ModelSpec(name="m", path="x", chat_template="yes")

    class WithBos:
        chat_template = None

        def encode(self, text, add_special_tokens=True):
            return ([1] if add_special_tokens else []) + [ord(c) for c in text]

    assert prompt_encoder(WithBos(), RECALL).prefix_ids == (1,)


def test_a_chat_template_goes_around_the_prompt():
    tokenizer = AutoTokenizer.from_pretrained(loading.local_path("asset:recall_mini"))
    tokenizer.chat_template = (
        "{% for m in messages %}user: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}bot:{% endif %}"
    )
    encoder = prompt_encoder(tokenizer, RECALL)
    around = (encoder.decode(encoder.prefix_ids), encoder.decode(encoder.suffix_ids))
    assert around == ("user: ", "\nbot:")
    bare = prompt_encoder(tokenizer, ModelSpec(name="m", path="x", chat_template="never"))
    assert bare.overhead == 0


def test_every_end_token_counts():
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=[7, 8]),
        config=SimpleNamespace(eos_token_id=9),
    )
    assert end_token_ids(model, SimpleNamespace(eos_token_id=3)) == {3, 7, 8, 9}


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
