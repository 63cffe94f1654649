"""Joint survival of neighbours: the ratio by brute force, by closed form, and in records."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from support.jobs import Echo, records_of
from support.probing import SYNTHETIC, probe_job

from kvbench.kv import CompressedKV
from kvbench.methods import build_method
from kvbench.probes.joint_survival import (
    JointSurvival,
    joint_survival,
    number_pairs,
    survivors,
)
from kvbench.run.runner import run_job
from kvbench.tasks.base import TaskError


def ratio_by_counting(kept, pairs):
    """The ratio for one head, `kept` a set of positions, in whole numbers until the end."""
    both = sum(i in kept and j in kept for i, j in pairs)
    one, other = sum(i in kept for i, _ in pairs), sum(j in kept for _, j in pairs)
    return both * len(pairs) / (one * other) if one and other else None


@pytest.mark.parametrize("distance", [1, 2, 7])
def test_the_ratio_is_what_counting_gives(distance):
    rng = random.Random(distance)
    heads = [set(rng.sample(range(60), 20)), set(range(0, 60, 2)), set(range(30)), set()]
    kept = torch.tensor([[i in head for i in range(60)] for head in heads])
    first = sorted(rng.sample(range(5, 60 - distance), 30))
    found = [ratio_by_counting(head, [(i, i + distance) for i in first]) for head in heads]
    known = [ratio for ratio in found if ratio is not None]
    assert len(known) == 3, "the head that keeps nothing has no ratio"
    got = joint_survival(kept, torch.tensor(first), distance)
    assert got == pytest.approx(sum(known) / 3)
    assert joint_survival(kept[3:], torch.tensor(first), distance) is None


def test_extremes_have_the_values_one_expects():
    first = torch.arange(40, 160)
    apart = torch.zeros(1, 200, dtype=torch.bool)
    apart[:, ::2] = True
    assert joint_survival(apart, first, 1) == 0.0
    assert joint_survival(apart, first, 2) == pytest.approx(2.0)
    assert joint_survival(torch.ones(1, 200, dtype=torch.bool), first, 3) == 1.0
    pairs = torch.zeros(1, 200, dtype=torch.bool)
    pairs[:, ::8] = pairs[:, 1::8] = True  # a quarter, always two by two: P(both) = 1/8
    assert joint_survival(pairs, first, 1) == pytest.approx((1 / 8) / (1 / 4) ** 2)


def test_positions_that_are_none_and_repeated_ones_do_not_count():
    positions = torch.tensor([[[3, -1, 5, 5, 0], [-1, -1, 7, 2, 7]]])
    part = torch.zeros(1, 2, 5, 4)
    kept = survivors(CompressedKV(part, part, None, positions), 8)
    assert kept.nonzero().tolist() == [[0, 0], [0, 3], [0, 5], [1, 2], [1, 7]]


def test_pairs_within_numbers():
    texts = ["a", " ", "12", "3", "x", "7", "<", "45", "67", "8", ">", "99"]
    assert number_pairs(texts, 1) == [2, 7]
    assert number_pairs(texts, 2) == [7]
    assert number_pairs(texts, 3) == []


def test_uniform_sampling_has_its_hypergeometric_value(tmp_path):
    """k of m without replacement: (k - 1) m / (k (m - 1)) at every distance; few entries, so that it
    is far enough from 1 to tell."""
    n, exact, rate, seeds = 44, 2, 0.25, 400
    probe = JointSurvival(
        rates=(rate,), layers=(1,), seeds=seeds, exact=exact, distances=(1, 5),
        synthetic=replace(SYNTHETIC, n=n),
    )  # fmt: skip
    methods = {"uniform": build_method("uniform")}
    rows = records_of(run_job(probe_job(tmp_path, probe, methods)))["uniform"]
    m, k = n - 2 * exact, round(rate * (n - 2 * exact))
    wanted = (k - 1) * m / (k * (m - 1))
    assert wanted < 0.93
    for distance in (1, 5):
        scores = [row["score"] for row in rows if row["distance"] == distance]
        assert len(scores) == seeds
        mean = sum(scores) / seeds
        error = math.sqrt(sum((s - mean) ** 2 for s in scores)) / seeds
        assert error < 0.02
        assert abs(mean - wanted) < 3.5 * error, (mean, wanted, error)


def test_balancing_separates_entries_that_are_alike(tmp_path):
    """Keys and values that come in equal twos get opposite signs; a walk without pull does not care."""
    probe = JointSurvival(
        rates=(0.5,), layers=(1, 2, 3), seeds=3, exact=16, distances=(1, 2, 3),
        synthetic=replace(SYNTHETIC, n=544),
    )  # fmt: skip

    class Twins(type(probe)):
        def captured(self, unit, session):
            for layer, kv in super().captured(unit, session):
                keys, values = (
                    part[:, :, : kv.n // 2].repeat_interleave(2, 2) for part in (kv.keys, kv.values)
                )
                yield layer, replace(kv, keys=keys, values=values)

    twins = Twins(**vars(probe))
    methods = {
        "exact": build_method("exact"),
        "balancekv": build_method("balancekv"),
        "uniform": build_method("uniform"),
    }
    records = records_of(run_job(probe_job(tmp_path, twins, methods)))
    mean = {}
    for label, rows in records.items():
        for distance in (1, 2, 3):
            scores = [row["score"] for row in rows if row["distance"] == distance]
            mean[label, distance] = sum(scores) / len(scores)
    assert all(mean["exact", distance] == 1.0 for distance in (1, 2, 3))
    assert mean["balancekv", 1] < 0.65, "every second pair at distance 1 is of twins"
    assert 0.9 < mean["uniform", 1] < 1.1


def test_records_name_prompt_layer_draw_and_distance(tmp_path):
    probe = JointSurvival(
        layers=(1, 3), seeds=2, num_prompts=2, exact=8, distances=(1, 4), prompts=Echo(count=2)
    )
    job = probe_job(tmp_path, probe)
    result = run_job(job)
    assert result.failed == 0
    records = records_of(result)
    assert {len(rows) for rows in records.values()} == {2 * 2 * 2 * 2}
    row = records["uniform"][1]
    where = {"prompt": "e0", "layer": 1, "rate": 0.25, "draw": 0, "distance": 4}
    assert {key: row[key] for key in where} == where
    assert row["example_id"] == "e0/layer1/rate0.25/seed0/distance4"
    assert probe.meta()["unit"] == "prompt"
    assert run_job(probe_job(tmp_path, probe)).written == 0


def test_what_is_no_choice_is_refused():
    with pytest.raises(TaskError, match=r"task.among is 'digits'; allowed: all \| numbers"):
        JointSurvival(among="digits", prompts=Echo(count=1))
    with pytest.raises(
        TaskError, match=r"task.among is 'numbers' and task.prompts is null; allowed: all$"
    ):
        JointSurvival(among="numbers", synthetic=SYNTHETIC)
    with pytest.raises(TaskError, match=r"task.distances is \[.*0.*\]; allowed"):
        JointSurvival(distances=(0,), synthetic=SYNTHETIC)
