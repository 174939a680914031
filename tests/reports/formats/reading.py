"""Reports read back, as a reader's program would."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """An HTML report.

    Attributes:
        tags: every element with its attributes.
        text: what a reader sees, without style sheets and scripts.
        tables: rows of the cells' texts, by the table's id.
        exact: the unrounded numbers of a table in reading order, by its id.
        scripts: texts of script elements, with their attributes.
        style: text of the style sheet.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.style = "", ""
        self.tables: dict[str, list[list[str]]] = {}
        self.exact: dict[str, list[float]] = {}
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._open = ""
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.tags.append((tag, values))
        if tag in ("script", "style"):
            self._open = tag
        if tag == "script":
            self.scripts.append((values, ""))
        elif tag == "table":
            self.tables[str(values["id"])] = self._rows = []
            self.exact[str(values["id"])] = self._numbers = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")
            self._in_cell = True
        elif tag == "data":
            self._numbers.append(float(values["value"] or "nan"))

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open:
            self._open = ""
        if tag in ("th", "td"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._open == "style":
            self.style += data
        else:
            self.text += data
            if self._in_cell:
                self._rows[-1][-1] += data

    @property
    def policy(self) -> dict[str, list[str]]:
        """The page's security policy: sources by directive."""
        content = next(a["content"] for tag, a in self.tags if tag == "meta" and "http-equiv" in a)
        parts = [part.split() for part in str(content).split(";")]
        return {name: sources for name, *sources in parts}


def markdown_tables(text: str) -> dict[str, list[list[str]]]:
    """Rows of the tables of a Markdown report by their headings, rendered as GitHub would."""
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    found: dict[str, list[list[str]]] = {}
    heading, rows = "", []
    for at, token in enumerate(tokens):
        if token.type == "paragraph_open":
            heading = "".join(child.content for child in tokens[at + 1].children or ())
        elif token.type == "table_open":
            rows = found[heading] = []
        elif token.type == "tr_open":
            rows.append([])
        elif token.type in ("th_open", "td_open"):
            rows[-1].append("".join(child.content for child in tokens[at + 1].children or ()))
    return found
