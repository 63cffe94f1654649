"""Warnings that a reader needs before the scores of an experiment: an exact cache at 0 %, and answers
or prompts that were cut."""

from __future__ import annotations

from kvbench.report.runs import BASELINE, Experiment, Group


def remarks(experiment: Experiment) -> list[str]:
    """A line for each model and task whose exact cache scores nothing, for each whose answers all ended
    because they may be no longer, and for each whose prompts lost their middle."""
    kinds = (_all_wrong, _all_cut, _shortened)
    return [line for group in experiment.groups for kind in kinds for line in kind(group)]


def _all_wrong(group: Group) -> list[str]:
    if not group.percent or group.meta.lower_is_better or group.meta.kind != "scores":
        return []
    exact = {variant.label for variant in group.variants if variant.method == BASELINE}
    scored = group.good[group.good["variant"].isin(exact)].dropna(subset="score")
    best = scored.groupby("dataset", sort=False)["score"].max()
    wrong = [str(name) for name, score in best.items() if score == 0]
    if not wrong:
        return []
    where = group.task if len(wrong) == len(best) else f"{group.task} ({', '.join(wrong)})"
    return [
        f"{group.model} on {where}: exact scores 0 %, so that no score says what a method loses"
    ]


def _all_cut(group: Group) -> list[str]:
    answers = group.good.reindex(columns=["new_tokens", "max_new_tokens"]).dropna()
    if answers.empty or (answers["new_tokens"] < answers["max_new_tokens"]).any():
        return []
    most = sorted({int(number) for number in answers["max_new_tokens"]})
    of_tokens = f"{most[0]}" if len(most) == 1 else f"{most[0]} to {most[-1]}"
    return [
        f"{group.model} on {group.task}: all {len(answers)} answers end at max_new_tokens "
        f"({of_tokens}), none by itself (task.max_new_tokens)"
    ]


def _shortened(group: Group) -> list[str]:
    prompts = group.records.reindex(columns=["example_id", "truncated_tokens"]).dropna()
    lost = prompts.drop_duplicates("example_id")["truncated_tokens"].astype(int)
    if not lost.any():
        return []
    return [
        f"{group.model} on {group.task}: {(lost > 0).sum()} of {len(lost)} prompts are longer than task "
        f"or model allows and lost their middle, {lost.max()} tokens at most"
    ]
