"""The folder for a static host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT


@pytest.mark.slow
def test_every_link_of_the_index_leads_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="needs kvbench[site]")
    words = [ROOT / "scripts/build_site.py", tmp_path, ROOT / "results/leaderboard"]
    (tmp_path / "CNAME").touch()
    subprocess.run([sys.executable, *words], check=True, cwd=tmp_path)
    links = re.findall(r'href="([^"]+)"', (tmp_path / "index.html").read_text())
    assert links == ["experiments/leaderboard/report.html", "api/index.html"]
    assert all((tmp_path / link).is_file() for link in links)
    assert list((tmp_path / "experiments/leaderboard/tables").glob("*.csv"))
    assert "kernel_size" in (tmp_path / "api/kvbench/methods/snapkv.html").read_text()
    assert (tmp_path / "CNAME").exists()
