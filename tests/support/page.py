"""What tests of report page and others share."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects what a page would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.fetched: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(tag)
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        self.fetched += [
            str(value)
            for name, value in attributes
            if name in ("src", "srcset", "action", "data") or (name == "href" and tag == "link")
        ]
