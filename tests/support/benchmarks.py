"""Invented data in the formats of published benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOOK = "Ann met Bob at the mill. They counted seven geese. " * 8


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def longbench_v2(folder: Path) -> Path:
    """data.json: one list."""
    rows = [
        {
            "_id": f"66{i}", "domain": "Single-Document QA", "sub_domain": "Literary",
            "difficulty": ("easy", "hard")[i % 2], "length": ("short", "medium", "long")[i % 3],
            "question": f"Who met Bob {i}? ", "context": BOOK * (i + 1), "answer": "ABCD"[i % 4],
            **{f"choice_{letter}": f"Option {letter}" for letter in "ABCD"},
        }
        for i in range(6)
    ]  # fmt: skip
    (folder / "data.json").write_text(json.dumps(rows))
    return folder


def infinitebench(folder: Path) -> Path:
    """<name>.jsonl with id, context, input, answer, options."""
    options = ["func_a", "func_b", "func_c", "func_d"]
    rows = {
        "passkey": ("What is the pass key?", "71432", []),
        "number_string": ("What is the sequence of digits?", "2233344555", []),
        "kv_retrieval": (
            'Key: "4bb5"\nThe value associated with the specified key is: ',
            "9c-1",
            [],
        ),
        "code_run": ("Please give me the exact number of the return value of func_1(4).", "-7", []),
        "code_debug": ("Which funtion has deliberate error?", "func_c", options),
        "math_find": ("You should answer: The largest number of the list is: ", "97", []),
        "math_calc": ("", ["1", "4", "9"], []),
        "longdialogue_qa_eng": ("", ["ANN"], []),
        "longbook_qa_eng": ("How many geese?", ["seven geese", "7"], []),
        "longbook_sum_eng": ("", ["Ann met Bob."], []),
        "longbook_choice_eng": ("Who met Bob?", ["Ann"], ["Carl", "Ann", "Dora", "Eve"]),
        "longbook_qa_chn": ("几只鹅？", ["七只"], []),
    }
    for name, (text, answer, choices) in rows.items():
        answers = answer if isinstance(answer, list) else [answer]
        row = {"context": BOOK, "input": text, "answer": answers, "options": choices}
        write_lines(folder / f"{name}.jsonl", [{"id": i, **row} for i in range(2)])
    return folder


def zeroscrolls(folder: Path) -> Path:
    """<name>/validation.jsonl, whose input is the whole prompt; rows of one id have other outputs."""
    outputs = {
        "gov_report": ["Seven geese were counted."], "summ_screen_fd": ["Ann met Bob."],
        "qmsum": ["They met."], "squality": ["Ann met Bob.", "They counted geese."],
        "qasper": ["seven", "7 geese"], "narrative_qa": ["Bob"], "quality": ["(B) Ann"],
        "musique": ["the mill"], "space_digest": ["62%"], "book_sum_sort": ["3, 1, 2, 4"],
    }  # fmt: skip
    for name, several in outputs.items():
        head, query = f"You are given a text.\n\nText:\n{BOOK}\n\n", "Question:\nWhat?\n\nAnswer:\n"
        rows = [
            {
                "id": f"{name}_1", "pid": f"{name}_1_{i}", "input": head + query, "output": output,
                "document_start_index": 30, "document_end_index": len(head) - 2,
                "query_start_index": len(head), "query_end_index": len(head + query),
                "truncation_seperator": "... [The rest is omitted]",
            }
            for i, output in enumerate(several)
        ]  # fmt: skip
        write_lines(folder / name / "validation.jsonl", rows)
    return folder


def loogle(folder: Path) -> Path:
    """<name>.jsonl with input, qa_pairs (a Python literal as text, or "none") and output."""
    pairs = [{"Q": "Who?", "A": "Ann and Bob", "S": ["Ann met Bob"]}, {"Q": "How many?", "A": "7"}]
    cloze = [{"Q": "<mask-0> met <mask-1>.", "A": {"<mask-0>": "Ann Lee", "<mask-1>": "Bob"}}]
    for name, asked in {"shortdep_qa": pairs, "longdep_qa": pairs, "shortdep_cloze": cloze}.items():
        row = {"input": BOOK, "title": "Mill", "qa_pairs": str(asked), "output": "none"}
        write_lines(folder / "data" / f"{name}.jsonl", [row])
    row = {"input": BOOK, "title": "Mill", "qa_pairs": "none", "output": "Ann met Bob at a mill."}
    write_lines(folder / "data" / "longdep_summarization.jsonl", [row])
    return folder


WRITERS = {
    "longbench_v2": longbench_v2,
    "infinitebench": infinitebench,
    "zeroscrolls": zeroscrolls,
    "loogle": loogle,
}
