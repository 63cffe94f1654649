"""Captions: the metrics against COCO's own and by hand, and a vision-language model's prompts."""

from __future__ import annotations

import copy
import json
import runpy
from pathlib import Path

import pytest
import torch
import transformers as t
from PIL import Image
from support.jobs import SMALL
from support.paths import ROOT
from support.tiny import GROUPED, Everything, prompt_ids

from kvbench.engine.attention import UnsupportedModel, register
from kvbench.engine.generate import run_batch
from kvbench.engine.loading import ModelSpec, check_serves_interface
from kvbench.engine.prompts import Prompt
from kvbench.engine.stopping import Stopping
from kvbench.engine.vision import text_attention
from kvbench.methods import build_method
from kvbench.run.plan import TaskPlan
from kvbench.run.session import Session
from kvbench.tasks.base import PromptEncoder, TaskError
from kvbench.tasks.caption_metrics import CiderD, rouge_l
from kvbench.tasks.caption_metrics import bleu as bleu_of
from kvbench.tasks.captions import Captions

REFERENCES = [
    ["a man rides a brown horse on the beach", "a person riding a horse near the sea"],
    ["two dogs play with a ball in the park", "dogs running after a ball"],
    ["a plate of food with rice and fish on it", "some rice and a fish on a white plate"],
]
NEEDS = "needs the package pycocoevalcap"
PREDICTIONS = ["a man riding a horse on the beach", "two dogs in a park with a red ball", "a plate"]


def test_metrics_equal_cocos_own():
    bleu = pytest.importorskip("pycocoevalcap.bleu.bleu", reason=NEEDS)
    cider = pytest.importorskip("pycocoevalcap.cider.cider", reason=NEEDS)
    rouge = pytest.importorskip("pycocoevalcap.rouge.rouge", reason=NEEDS)
    truth = dict(enumerate(REFERENCES))
    said = {place: [text] for place, text in enumerate(PREDICTIONS)}
    pairs = list(zip(PREDICTIONS, REFERENCES, strict=True))
    found = CiderD.of(REFERENCES)
    _, each = cider.Cider().compute_score(truth, said)
    assert [found.score(*pair) for pair in pairs] == pytest.approx(list(each), abs=1e-9)
    _, each = rouge.Rouge().compute_score(truth, said)
    assert [rouge_l(*pair) for pair in pairs] == pytest.approx(list(each), abs=1e-9)
    whole, _ = bleu.Bleu(4).compute_score(truth, said, verbose=0)
    assert bleu_of(PREDICTIONS, REFERENCES) == pytest.approx(whole, abs=1e-6)


def test_metrics_by_hand():
    assert rouge_l("A red disc!", ["a red disc"]) == pytest.approx(1.0)
    # precision 2/2, recall 2/4, beta 1.2
    assert rouge_l("red disc", ["a red disc here"]) == pytest.approx(2.44 * 0.5 / (0.5 + 1.44))
    assert rouge_l("", ["a disc"]) == 0.0
    one = bleu_of(["the the the"], [["the disc", "the the wall"]])
    assert one == pytest.approx([2 / 3, (2 / 3 * 1 / 2) ** 0.5, 0.0, 0.0])
    assert one[2] == one[3] == 0.0
    short = bleu_of(["a red"], [["a red disc here"]])
    assert short[0] == pytest.approx(2.718281828459045 ** (1 - 4 / 2))
    assert bleu_of([""], [["a disc"]]) == [0.0] * 4
    cider = CiderD.of(REFERENCES)
    assert cider.score(REFERENCES[1][0], [REFERENCES[1][0]]) == pytest.approx(10.0)
    assert cider.score("an unknown thing", REFERENCES[0]) == 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("vision")
    made = runpy.run_path(str(ROOT / "scripts/tiny_vision.py"))
    made["save_model"](place)
    made["draw_images"](place)
    return place


def session_of(folder: Path, **changes) -> Session:
    spec = ModelSpec(name="vlm", path=str(folder))
    return Session(spec, torch.device("cpu"), torch.float32, **changes)


@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_image_tokens_are_compressed_and_exact_is_transformers_own(folder, compress_after):
    session = session_of(folder, compress_after=compress_after)
    task = Captions(data=str(folder / "dataset_coco.json"), max_new_tokens=8, stop=())
    methods = {
        "exact": (build_method("exact"), SMALL),
        "everything": (Everything(), SMALL),
        "balancekv": (build_method("balancekv", block_size=8), SMALL),
    }
    plan = TaskPlan(task)
    units = plan.units(session, methods)
    outcomes = [list(plan.run(unit, methods, session)) for unit in units]
    assert len(outcomes) == 3
    # each image differently: the tower is looked through
    model = t.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = t.AutoProcessor.from_pretrained(folder)
    said = []
    for unit, found in zip(units, outcomes, strict=True):
        records = {one.method: one.fields for one in found}
        image = Image.open(folder / unit.id).convert("RGB")
        inputs = processor(images=image, text="<image>\n" + task.question, return_tensors="pt")
        inputs.pop("mm_token_type_ids", None)
        n = inputs["input_ids"].shape[1]
        made = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, n:]
        expected = processor.tokenizer.decode(made, skip_special_tokens=True)
        said.append(expected)
        for name in ("exact", "everything"):
            assert records[name]["status"] == "ok"
            assert records[name]["prediction"] == expected
        assert records["exact"]["prompt_tokens"] == n > 64  # 64 patches and the question
        after = compress_after == "context"
        compressed = n - (len(unit.payload.examples[0].question_ids) if after else 0)
        entries = records["balancekv"]["entries"]
        assert entries["max"] <= SMALL.capacity(compressed) + 1
        assert records["balancekv"]["ratio"] < 0.6
        assert set(task.measures) <= set(records["exact"])
    assert len(set(said)) > 1


@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_internvl_answers_as_transformers_own(compress_after):
    text = t.Qwen2Config(**GROUPED)
    vision = t.InternVLVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=[32, 32],
        patch_size=[4, 4],
    )
    register()
    torch.manual_seed(0)
    config = t.InternVLConfig(vision_config=vision, text_config=text, image_token_id=96)
    check_serves_interface(config)
    model = t.AutoModelForImageTextToText.from_config(config).eval()
    ids = [*prompt_ids(5), *[96] * 16, *(min(i, 95) for i in prompt_ids(30, seed=2))]
    answers = []
    for _ in range(2):
        pixels = torch.randn(1, 3, 32, 32)
        given = {"input_ids": torch.tensor([ids]), "pixel_values": pixels}
        made = model.generate(**given, max_new_tokens=8, do_sample=False)[0, len(ids) :]
        switched = copy.deepcopy(model)
        switched.set_attn_implementation(text_attention(config))
        prompt = Prompt(
            ids[:21],
            ids[21:],
            {"exact": (build_method("exact"), SMALL), "h2o": (build_method("h2o"), SMALL)},
            Stopping(8),
            "x",
            inputs={"pixel_values": pixels},
        )
        (found,) = run_batch(switched, [prompt], seed=0, compress_after=compress_after)
        assert found["exact"].tokens == made.tolist()
        assert found["h2o"].failure is None
        answers.append(made.tolist())
    assert answers[0] != answers[1], "the image says nothing"


def test_a_batch_answers_as_each_image_alone(folder):
    session = session_of(folder)
    plan = TaskPlan(Captions(data=str(folder / "dataset_coco.json"), max_new_tokens=6))
    methods = {"snapkv": (build_method("snapkv"), SMALL)}
    units = plan.units(session, methods)
    together = plan.run_batch([(unit, methods) for unit in units], session)
    for unit, found in zip(units, together, strict=True):
        (alone,) = plan.run(unit, methods, session)
        assert alone.fields["prediction"] == found[0].fields["prediction"]


def test_forms_of_the_file(folder, tmp_path):
    karpathy = json.loads((folder / "dataset_coco.json").read_text())
    images = karpathy["images"]
    want = [(row["filename"], [one["raw"] for one in row["sentences"]]) for row in images]
    coco = {
        "images": [{"id": i, "file_name": file} for i, (file, _) in enumerate(want)],
        "annotations": [
            {"image_id": i, "caption": text} for i, (_, texts) in enumerate(want) for text in texts
        ],
    }
    images[2]["split"] = "train"
    rows = [{"image": file, "captions": captions} for file, captions in want]
    for name, form, count in (("a", coco, 3), ("b", karpathy, 2), ("c", rows, 3)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(form))
        assert Captions(data=str(file))._rows == want[:count]
        assert list(Captions(data=str(file)).digests()) == [file.name]


def test_what_is_refused_is_one_line(folder, tmp_path):
    session = session_of(folder)
    text_only = PromptEncoder(session.tokenizer)
    data = str(folder / "dataset_coco.json")
    with pytest.raises(TaskError, match="the model reads text alone"):
        Captions(data=data).examples(text_only)
    with pytest.raises(TaskError, match=r"task\.data is null"):
        Captions().examples(session.encoder)
    with pytest.raises(TaskError, match=r"no image .*red\.png; allowed: task\.images"):
        Captions(data=data, images=str(tmp_path)).examples(session.encoder)
    broken = tmp_path / "broken.json"
    broken.write_text('{"images": [{"x": 1}]}')
    with pytest.raises(TaskError, match="has none of COCO's forms"):
        Captions(data=str(broken)).examples(session.encoder)
    with pytest.raises(UnsupportedModel, match="allowed of these: internvl, llava"):
        check_serves_interface(t.Qwen2VLConfig())


def test_a_method_that_repeats_the_prompt_fails_alone(folder):
    session = session_of(folder)
    plan = TaskPlan(Captions(data=str(folder / "dataset_coco.json"), max_new_tokens=4))
    methods = {
        "kvzip": (build_method("kvzip", instructed=False), SMALL),
        "exact": (build_method("exact"), SMALL),
    }
    unit = plan.units(session, methods)[0]
    found = {one.method: one.fields for one in plan.run(unit, methods, session)}
    assert "repeats the prompt, which shows images" in found["kvzip"]["error"]
    assert found["exact"]["status"] == "ok"
