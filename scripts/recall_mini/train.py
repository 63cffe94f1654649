"""Train recall_mini, the small retrieval model that ships with kvbench.

    python scripts/recall_mini/train.py            an hour on one core (`make train-recall-mini`)
    python scripts/recall_mini/train.py --resume   goes on from the newest checkpoint

From scratch, on generated data only: no downloaded text and no downloaded weights. The stages are

1. ``cycles``: in-context bigrams (random successor cycles), loss on every token, growing alphabet;
2. ``pairs``, ``lines``: key-value lines repeated in shuffled order, loss on every token;
3. ``record``, ``needle``: LongEval records and needle prompts with questions, longer and longer;
4. ``mixture``: prompts of all lengths, learning rate to zero.

A stage also revisits the ones before it. It ends as soon as its accuracy passes its target or its share
of the time is used up, so that no stage can hang. Written: the model and its tokenizer to --asset
(kvbench/assets/recall_mini), log and checkpoints to --run; the seconds and accuracies of the stages are
printed, then the accuracies of evaluate.py.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
import torch.nn.functional as F
from recall_mini_data import VOCAB_SIZE, Example, Generator, train_tokenizer
from shipped import ASSET
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass
class Batch:
    """Token ids [batch, n]; loss weight and accuracy mask of *predicting* the token at each place.

    ``vocabulary`` limits the softmax to some ids (ascending), which is cheaper.
    """

    ids: np.ndarray
    weight: np.ndarray
    scored: np.ndarray
    vocabulary: np.ndarray | None = None


@dataclass
class Stage:
    """One step of the curriculum: ends at ``target`` accuracy or after ``minutes``.

    Every fourth batch comes from ``review``. With ``decay`` the learning rate falls to zero over
    the stage's minutes, and only time ends it.
    """

    name: str
    make: Callable[[np.random.Generator], Batch]
    target: float = 0.95
    minutes: float = 4.0
    min_steps: int = 20
    lr: float = 1.5e-3
    decay: bool = False
    review: list[Callable[[np.random.Generator], Batch]] = field(default_factory=list)


HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 128, 4, 2, 32, 4
ROPE_THETA = 1e7


def build_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("sdpa")
    structure_first_layers(model)
    return model


@torch.no_grad()
def structure_first_layers(
    model: LlamaForCausalLM, sharpness: float = 32.0, match: float = 1.7, copy: float = 0.5
) -> None:
    """Start layers 0 and 1 near the circuit that in-context copying needs.

    From wholly random weights a model this small waits more than a thousand steps on a plateau
    before that circuit appears. Nothing is frozen: these are starting values like any others.

    Layer 0: all embeddings get a constant part, from which head h reads a query and a key that the
    rotary position encoding turns into a score with its peak at distance h + 1: the heads look at
    the previous token, the one before it, and so on, and write what they see into directions of
    their own. Layer 1: queries made of a token's own embedding meet keys made of what layer 0 wrote
    as "previous token" (in the slowly turning dimensions, which carry content over long distances),
    and the value, the attended token itself, is added to the prediction.
    """
    half, group = HEAD_DIM // 2, HEADS // KV_HEADS

    def directions() -> torch.Tensor:
        return torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0]

    def head_rows(head: int) -> slice:
        return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)

    rate = 1.0 / ROPE_THETA ** (torch.arange(half, dtype=torch.float64) / half)
    constant = F.normalize(torch.randn(HIDDEN), dim=0)
    table = model.model.embed_tokens.weight
    table += 0.3 * constant
    share = 0.3 / float(table.norm(dim=1).mean())
    gain = sharpness**0.5 / (share * HIDDEN**0.5)

    first = model.model.layers[0].self_attn
    for pair in range(4):  # the fastest turning pairs of dimensions tell neighbours apart
        for head in range(KV_HEADS):
            first.k_proj.weight[head * HEAD_DIM + pair] += gain * constant
        for head in range(HEADS):
            angle = -float(rate[pair]) * (head + 1)
            row = head * HEAD_DIM + pair
            first.q_proj.weight[row] += gain * math.cos(angle) * constant
            first.q_proj.weight[row + half] += gain * math.sin(angle) * constant
    read, write = directions(), directions()
    first.v_proj.weight.copy_(read[: KV_HEADS * HEAD_DIM])
    for head in range(HEADS):
        first.o_proj.weight[:, head_rows(head)] = write[head_rows(head)].t()

    second = model.model.layers[1].self_attn
    slow = [*range(half // 2, half), *range(half + half // 2, HEAD_DIM)]
    for head in range(KV_HEADS):
        for place, dim in enumerate(slow):
            source = head * len(slow) + place
            second.k_proj.weight[head * HEAD_DIM + dim] += match * write[source]
            for member in range(head * group, (head + 1) * group):
                second.q_proj.weight[member * HEAD_DIM + dim] += match * read[source]
    seen = directions()
    second.v_proj.weight.copy_(seen[: KV_HEADS * HEAD_DIM])
    for head in range(HEADS):
        second.o_proj.weight[:, head_rows(head)] = copy * seen[head_rows(head // group)].t()


def cycles_batch(
    rng: np.random.Generator, alphabet: np.ndarray, batch: int = 64, length: int = 64
) -> Batch:
    """Sequences that each walk a random successor cycle of their own, of 6 to 19 symbols; one step in
    five jumps to a random symbol of the cycle."""
    size = rng.integers(6, 20, batch)
    symbols = np.stack([rng.choice(alphabet, 19, replace=False) for _ in range(batch)])
    jump = rng.random((batch, length)) < 0.2
    target = (rng.random((batch, length)) * size[:, None]).astype(np.int64)
    place = np.zeros((batch, length), np.int64)
    place[:, 0] = target[:, 0]
    known = np.zeros((batch, 19), bool)
    scored = np.zeros((batch, length), bool)
    rows = np.arange(batch)
    for t in range(1, length):
        before = place[:, t - 1]
        place[:, t] = np.where(jump[:, t], target[:, t], (before + 1) % size)
        scored[:, t] = known[rows, before] & ~jump[:, t]
        known[rows, before] |= ~jump[:, t]
    ids = symbols[rows[:, None], place]
    weight = np.ones((batch, length), np.float32)
    return Batch(ids, weight, scored, np.sort(alphabet))


def loss_and_accuracy(
    model: LlamaForCausalLM, batch: Batch, device: torch.device
) -> tuple[torch.Tensor, float]:
    """Weighted cross-entropy of one batch and the accuracy on its scored places."""
    ids = torch.from_numpy(batch.ids).to(device)
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    weight = torch.from_numpy(batch.weight[:, 1:]).to(device).reshape(-1)
    scored = torch.from_numpy(batch.scored[:, 1:]).to(device).reshape(-1)
    used = (weight > 0).nonzero().squeeze(1)
    head = model.lm_head.weight
    labels = ids[:, 1:].reshape(-1)[used]
    if batch.vocabulary is not None:
        vocabulary = torch.from_numpy(batch.vocabulary).to(device)
        head = head[vocabulary]
        labels = torch.searchsorted(vocabulary, labels)
    logits = hidden.reshape(-1, hidden.shape[-1])[used] @ head.t()
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    loss = (losses * weight[used]).sum() / weight[used].sum()
    with torch.no_grad():
        right = (logits.argmax(-1) == labels) & scored[used]
        accuracy = float(right.sum()) / max(1, int(scored[used].sum()))
    return loss, accuracy


def write_asset(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model and tokenizer to ``folder``, each file replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        settings = Path(name) / "tokenizer_config.json"
        options = json.loads(settings.read_text(encoding="utf-8"))
        options["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name every release knows
        settings.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
        for file in Path(name).iterdir():
            file.chmod(0o644)
            file.replace(folder / file.name)


class Trainer:
    """Runs the stages, writes checkpoints and a log, and can go on where it was stopped."""

    def __init__(self, args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.args = args
        self.device = torch.device(args.device)
        self.model = build_model(args.seed)
        torch.nn.Module.to(self.model, self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.done: list[dict[str, Any]] = []
        self.step = 0
        self.spent = 0.0
        self.run = Path(args.run)
        self.run.mkdir(parents=True, exist_ok=True)
        self.checkpoint = self.run / "checkpoint.pt"
        self.log_file = (self.run / "train.log").open("a", buffering=1)
        self.in_stage: dict[str, Any] | None = None
        if args.resume and self.checkpoint.exists():
            self.load()

    def log(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {self.spent / 60:6.1f} min step {self.step:6d} {text}"
        print(line, flush=True)
        self.log_file.write(line + "\n")

    def save(self) -> None:
        """Write a checkpoint of everything, and the model as it is now as the asset."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": self.done,
            "step": self.step,
            "spent": self.spent,
            "in_stage": self.in_stage,
        }
        temporary = self.checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.checkpoint)
        if self.args.asset:
            write_asset(self.model, self.tokenizer, Path(self.args.asset))

    def load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.step, self.spent = state["done"], state["step"], state["spent"]
        self.in_stage = state["in_stage"]

    def learning_rate(self, stage: Stage, spent: float) -> float:
        """The learning rate of the next step, `spent` seconds after the stage's beginning."""
        warmup = min(1.0, (self.step + 1) / 50)
        factor = 1.0
        if stage.decay:
            share = min(1.0, spent / (60 * stage.minutes))
            factor = 0.5 * (1 + math.cos(math.pi * share))
        return stage.lr * warmup * max(0.01, factor)

    def train_on(self, batch: Batch, learning_rate: float) -> tuple[torch.Tensor, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss, accuracy = loss_and_accuracy(self.model, batch, self.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss, accuracy

    def run_stage(self, stage: Stage) -> None:
        """Train one stage until its target accuracy or its time."""
        if any(entry["name"] == stage.name for entry in self.done):
            return
        if self.in_stage is None or self.in_stage["name"] != stage.name:
            self.in_stage = {"name": stage.name, "step": 0, "spent": 0.0, "recent": []}
        state = self.in_stage
        recent: list[float] = state["recent"]
        last_save = last_log = time.time()
        self.log(f"stage {stage.name}")
        while True:
            start = time.time()
            rng = np.random.default_rng([self.args.seed, self.step])
            review = bool(stage.review) and state["step"] % 4 == 3
            make = stage.review[int(rng.integers(len(stage.review)))] if review else stage.make
            batch = make(rng)
            loss, accuracy = self.train_on(batch, self.learning_rate(stage, state["spent"]))
            state["step"] += 1
            if not review:
                recent.append(accuracy)
                del recent[:-20]
            state["spent"] += time.time() - start
            self.spent += time.time() - start
            mean = sum(recent) / max(1, len(recent))
            if time.time() - last_log > self.args.log_every:
                last_log = time.time()
                speed = state["spent"] / state["step"]
                self.log(
                    f"{stage.name} loss {float(loss.detach()):.3f} acc {mean:.3f} {speed:.2f} s/step"
                )
            if time.time() - last_save > 60 * self.args.save_minutes:
                last_save = time.time()
                self.save()
            enough = state["step"] >= stage.min_steps and len(recent) == 20
            passed = enough and mean >= stage.target and not stage.decay
            if passed or state["spent"] > 60 * stage.minutes:
                break
        self.log(f"stage {stage.name} ends: acc {mean:.3f} after {state['step']} steps")
        self.done.append(
            {
                "name": stage.name,
                "accuracy": round(mean, 4),
                "steps": state["step"],
                "minutes": round(state["spent"] / 60, 1),
                "passed": passed,
            }
        )
        self.in_stage = None
        self.save()


def text_batch(
    rng: np.random.Generator, make: Callable[[random.Random], Example], tokens: int = 4096
) -> Batch:
    """Examples of about one length, padded, of ``tokens`` tokens in all."""
    source = random.Random(int(rng.integers(2**62)))
    examples = [make(source)]
    while sum(len(e.ids) for e in examples) + len(examples[0].ids) <= tokens:
        examples.append(make(source))
    length = max(len(example.ids) for example in examples)
    ids = np.zeros((len(examples), length), np.int64)
    weight = np.zeros((len(examples), length), np.float32)
    scored = np.zeros((len(examples), length), bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = example.ids
        weight[row, : len(example.ids)] = example.weight
        scored[row, : len(example.ids)] = example.scored
    return Batch(ids, weight, scored)


Maker = Callable[[np.random.Generator], Batch]


def shuffled_batch(rng: np.random.Generator, text: Generator, lines: int, full: bool) -> Batch:
    """A few lines again and again in shuffled order."""
    length = (52 if full else 20) * lines
    return text_batch(rng, lambda source: text.shuffled_lines(source, lines, length, full))


def record_batch(rng: np.random.Generator, text: Generator, low: int, high: int) -> Batch:
    """Records of ``low`` to ``high`` lines, all of one number of lines."""
    lines = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    questions = min(lines, 8 + lines // 5)
    repeats = 1 if rng.random() < 0.9 else int(rng.integers(2, 5))
    lines = max(low, lines // repeats)
    return text_batch(rng, lambda source: text.record(source, lines, questions, repeats))


def needle_batch(rng: np.random.Generator, text: Generator, low: int, high: int) -> Batch:
    """Needle prompts of ``low`` to ``high`` tokens with several needles each."""
    length = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    count = int(rng.integers(1, 3 + min(6, length // 300)))
    return text_batch(rng, lambda source: text.needles(source, length, count))


def mixed_batch(rng: np.random.Generator, parts: list[tuple[float, Maker]]) -> Batch:
    """One of several kinds of batch, drawn with these weights."""
    weights = np.array([weight for weight, _ in parts])
    return parts[int(rng.choice(len(parts), p=weights / weights.sum()))][1](rng)


def stages(args: argparse.Namespace, text: Generator) -> list[Stage]:
    """The curriculum, in order; the last stage, ``mixture``, takes the time that the others left."""

    def records(low: int, high: int) -> Maker:
        return partial(record_batch, text=text, low=low, high=high)

    def needles(low: int, high: int) -> Maker:
        return partial(needle_batch, text=text, low=low, high=high)

    order = np.random.default_rng(args.seed).permutation(np.arange(1, VOCAB_SIZE))
    result: list[Stage] = []
    for size in (64, 128, 256, 512, VOCAB_SIZE - 1):
        maker: Maker = partial(cycles_batch, alphabet=order[:size])
        result.append(Stage(f"cycles{size}", maker, target=0.85, minutes=12.0))
    for lines in (4, 8):
        maker = partial(shuffled_batch, text=text, lines=lines, full=False)
        review = [result[4].make]
        result.append(Stage(f"pairs{lines}", maker, minutes=5.0, review=review))
    for lines in (3, 6):
        maker = partial(shuffled_batch, text=text, lines=lines, full=True)
        review = [result[-1].make]
        result.append(Stage(f"lines{lines}", maker, minutes=6.0, review=review))
    before = [result[-1].make]
    for low, high in ((3, 6), (6, 12), (12, 24), (24, 48), (48, 96), (96, 192)):
        maker = records(low, high)
        review = [*before[-2:], needles(60, 400)]
        result.append(Stage(f"record{high}", maker, minutes=6.0, review=review))
        before.append(maker)
    for low, high in ((60, 250), (250, 1000)):
        maker = needles(low, high)
        result.append(Stage(f"needle{high}", maker, target=0.9, minutes=5.0, review=before[-4:]))
    parts = [
        (0.2, records(10, 60)),
        (0.3, records(60, 160)),
        (0.2, records(160, 300)),
        (0.05, records(300, 400)),
        (0.08, needles(100, 800)),
        (0.17, needles(800, 4200)),
    ]
    everything = partial(mixed_batch, parts=parts)
    result.append(Stage("mixture", everything, minutes=args.minutes, decay=True))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=51.3, help="of all stages together")
    parser.add_argument("--asset", default=str(ASSET), help="written with every checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument(
        "--run", default="outputs/recall_mini", help="folder of log and checkpoints"
    )
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log-every", type=float, default=15.0, help="seconds")
    parser.add_argument("--save-minutes", type=float, default=2.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = train_tokenizer()
    trainer = Trainer(args, tokenizer)
    for stage in stages(args, Generator(tokenizer)):
        used = sum(entry["minutes"] for entry in trainer.done)
        stage.minutes = min(stage.minutes, max(0.05, args.minutes - used))
        trainer.run_stage(stage)
    trainer.log(json.dumps(trainer.done))
    evaluate.main(["--model", args.asset, "--threads", str(args.threads)])


if __name__ == "__main__":
    main()
