"""A headless Chromium driven over its debugging pipe; no network, no further packages."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSER = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)


AXE = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    / "kvbench-axe/node_modules/axe-core/axe.min.js"
)
"""axe-core's rules, where `.ci/run` puts them."""


class Chromium:
    """One page in one browser; use as a context manager.

    Args:
        profile: an empty folder.
    """

    def __init__(self, profile: Path) -> None:
        if BROWSER is None:
            raise RuntimeError("no Chromium on PATH")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def number_pipes() -> None:  # the browser reads commands from 3 and answers on 4
            os.dup2(to_browser, 13)
            os.dup2(from_browser, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self._process = subprocess.Popen(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--no-first-run",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=number_pipes,
            close_fds=False,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._count = 0
        self._events: list[dict[str, Any]] = []
        targets = self._send("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session: str | None = None
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._in)
        os.close(self._out)

    def open(self, page: Path, width: int = 1280, *, dark: bool = False) -> None:
        """Load a file, in a window so wide, in light or dark mode."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._events.clear()
        self._send("Page.navigate", url=page.resolve().as_uri())
        self._wait_for("Page.loadEventFired")

    def as_printed(self, width: int) -> None:
        """The open page as on paper so wide, in CSS pixels."""
        self._send("Emulation.setEmulatedMedia", media="print")
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression on the page; of a promise, what it comes to."""
        answer = self._send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["text"])
        return answer["result"].get("value")

    def accessibility(self, axe: Path) -> list[str]:
        """What axe-core's rules complain of: rule, element and why, one line each."""
        self._send("Runtime.evaluate", expression=axe.read_text(encoding="utf-8"))
        found: list[str] = self.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.flatMap("
            "v => v.nodes.map(n => v.id + ' ' + n.target + ': ' + n.failureSummary)))"
        )
        return found

    def press(self, key: str) -> None:
        """One key, as the keyboard gives it."""
        for kind in ("rawKeyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def hover(self, x: float, y: float) -> None:
        """The mouse moves to a place in the window."""
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        answer = self._send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, path: Path) -> None:
        """The page as it would be printed."""
        answer = self._send("Page.printToPDF", preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    @property
    def requests(self) -> list[str]:
        """Addresses the page asked for since it was opened."""
        names = [e for e in self._events if e["method"] == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in names]

    @property
    def complaints(self) -> list[str]:
        """What the browser logged since the page was opened: errors, blocked scripts."""
        return [
            e["params"]["entry"]["text"] for e in self._events if e["method"] == "Log.entryAdded"
        ]

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _wait_for(self, event: str) -> Mapping[str, Any]:
        while True:
            for seen in self._events:
                if seen["method"] == event:
                    return seen
            self._receive()

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 16)
            if not data:
                raise RuntimeError("Chromium ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self._events.append(message)
        return message
