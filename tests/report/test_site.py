"""The folder for a static host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.paths import ROOT

from kvbench.catalogue import catalogue
from kvbench.records.read import StoreError
from kvbench.report.__main__ import main
from kvbench.report.site import build_site

LEADERBOARD = ROOT / "results" / "leaderboard"


def test_a_method_has_a_page_with_what_is_known_of_it(tmp_path: Path) -> None:
    index = build_site(tmp_path / "site", [LEADERBOARD], reference=False)
    text = index.read_text(encoding="utf-8")
    for name in catalogue("methods"):
        assert f'href="methods/{name}.html"' in text
    snapkv = (tmp_path / "site/methods/snapkv.html").read_text(encoding="utf-8")
    for part in (
        "Keeps the window",
        "golden values, MInference, kvpress",
        "<td>kernel_size</td><td>5</td><td>Odd</td>",
        "53.3 %",
        "36.1 to 69.8",
    ):
        assert part in snapkv, part
    exact = (tmp_path / "site/methods/exact.html").read_text(encoding="utf-8")
    assert "Checked against: generate of transformers, 16 architectures" in exact
    assert "Paper: the exact cache" in exact, "the class says it, the table does not"
    released = (tmp_path / "site/methods/snapkv.html").parent / "balancekv_released.html"
    assert "BalanceKV" in released.read_text(encoding="utf-8")


def test_every_link_leads_somewhere_and_to_no_other_host(tmp_path: Path) -> None:
    build_site(tmp_path / "site", [LEADERBOARD], reference=False)
    pages = [
        page for page in (tmp_path / "site").rglob("*.html") if "experiments" not in page.parts
    ]
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"(?:src|href)=\"https?:", text), page
        for link in re.findall(r'href="([^"]+)"', text):
            assert (page.parent / link).is_file(), (page, link)


@pytest.mark.slow
def test_the_interface_is_made_of_its_docstrings(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="needs kvbench[site]")
    assert main(["--site", str(tmp_path / "site"), str(LEADERBOARD)]) == 0
    text = (tmp_path / "site/api/kvbench/api.html").read_text(encoding="utf-8")
    assert "Compress the cache of everything" in text


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(StoreError, match="holds other files"):
        build_site(tmp_path, [LEADERBOARD])
    with pytest.raises(StoreError, match="no reports in"):
        build_site(tmp_path / "site", [tmp_path])
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_site_made_again_keeps_what_the_user_put_beside_its_pages(tmp_path: Path) -> None:
    build_site(tmp_path / "site", [LEADERBOARD], reference=False)
    (tmp_path / "site/CNAME").write_text("mine")
    old = tmp_path / "site/methods/old.html"
    old.touch()
    build_site(tmp_path / "site", [LEADERBOARD], reference=False)
    assert (tmp_path / "site/CNAME").read_text() == "mine"
    assert not old.exists()
