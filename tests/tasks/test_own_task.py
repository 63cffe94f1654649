"""What conf/README.md says about a task of one's own works as written."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.command import main
from support.paths import ROOT

SECTION = re.search(
    r"^## Add your own task\n(.*?)^## ", (ROOT / "conf/README.md").read_text(), re.M | re.S
)
assert SECTION is not None
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```$", SECTION[1], re.M | re.S))


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By method."""
    return {
        path.parent.name.rpartition("-")[0]: [json.loads(x) for x in path.read_text().splitlines()]
        for path in folder.rglob("records.jsonl")
    }


@pytest.mark.parametrize("form", ["sh", "yaml"])
def test_a_task_of_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text(BLOCKS["json"])
    _, *command = shlex.split(BLOCKS["sh"])
    if form == "yaml":
        assert len(BLOCKS["yaml"].splitlines()) <= 10
        (tmp_path / "conf/task").mkdir(parents=True)
        (tmp_path / "conf/task/mine.yaml").write_text(BLOCKS["yaml"])
        command = ["task=mine", f"hydra.searchpath=[file://{tmp_path / 'conf'}]", command[-1]]
    quiet = ["logger=none", f"results_dir={tmp_path}", "method=[exact,snapkv,balancekv]"]
    status, out, err = main(capsys, *command, *quiet)
    assert status == 0, err
    found = records(tmp_path)
    assert set(found) == {"exact", "snapkv", "balancekv"}
    for label, mine in found.items():
        assert [record["answers"] for record in mine] == [["millstone"], ["Ann"]]
        assert {record["status"] for record in mine} == {"ok"}
        assert len({record["context_id"] for record in mine}) == 1
        assert all(record["compressed"] for record in mine) == (label != "exact")
    assert "balancekv" in out


def test_a_wrong_field_is_one_line_with_the_fields_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text(BLOCKS["json"])
    _, *command = shlex.split(BLOCKS["sh"].replace("context: text", "context: txt"))
    status, _, err = main(capsys, *command, "logger=none", f"results_dir={tmp_path / 'runs'}")
    assert (status, err.count("\n")) == (2, 1)
    assert "no field 'txt' (task.fields.context) (did you mean 'text'?)" in err
    assert "fields there are: text, q, gold" in err
