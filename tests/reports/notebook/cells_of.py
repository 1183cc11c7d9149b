"""What tests read of a notebook's cell: its elements, checked to be nested as HTML must be."""

from __future__ import annotations

from html.parser import HTMLParser

ALONE = {"meta", "input", "wbr", "br"}


class Reader(HTMLParser):
    """Reads a cell into a list of elements; `problems` has what is not closed as it was opened.

    Each element is its tag, its attributes, and the text below it.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{name}> is open" for name, _, _ in self._open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))
        if tag not in ALONE:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag):
        if not self._open or self._open.pop()[0] != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data):
        for _, _, words in self._open:
            words.append(data)

    def texts(self, tag: str, kind: str | None = None) -> list[str]:
        """Returns the texts of elements by tag and, if given, by a class."""
        return [
            "".join(words)
            for name, attributes, words in self.elements
            if name == tag and (kind is None or kind in (attributes.get("class") or "").split())
        ]


def read(text: str) -> Reader:
    """Returns a cell as it is read, which must be one element and well nested."""
    reader = Reader(text)
    assert reader.problems == []
    assert reader.elements[0][:2] == ("div", {"class": "meshdsl-cell"})
    return reader
