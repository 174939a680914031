"""The explorer as one HTML page that asks the network for nothing, for a folder, a dashboard or a notebook."""

from __future__ import annotations

import functools
import html
import json
import pathlib
import re
from typing import Any

from driftlens.config.requests import ViewRequest
from driftlens.results.formatting import printable
from driftlens.results.verdict import headline
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import attach
from driftlens.utils.files import PathLike, atomic_path
from driftlens_reports.charts.theme import CLASSES, Palette, palette
from driftlens_reports.content import Headline
from driftlens_reports.explorer.gathering import gathered
from driftlens_reports.formats.page import STYLE, block, digest

_HERE = pathlib.Path(__file__).parent
_SLOT = re.compile(r"\{\{(\w+)\}\}")
_COMMAND = re.compile("[:;] `(driftlens [^`]+|--samples)`.*")
_UNSAFE = re.compile("[<>&\u2028\u2029]")


class Explorer:
    """A page in which the samples of a run move from model to model; nothing is read before it is asked for.

    Args:
        run: a run, or its folder.
        request: which tasks, how many samples, which layout.

    Raises:
        RunError: the run can't be read.
    """

    def __init__(self, run: DriftRun | PathLike, request: ViewRequest = ViewRequest()) -> None:
        self.run = run if isinstance(run, DriftRun) else open_run(run)
        self._request = request

    @functools.cached_property
    def page(self) -> bytes:
        """The page, the same bytes for the same run."""
        found = Headline.model_validate(headline(self.run))
        heads = "".join(
            f'<div class="in-{look}">{block(found, dark=look == "dark")}</div>' for look in ("light", "dark")
        )
        return page(self._data, f'<header><h1>{_name(self._data)}</h1>{heads}<p id="verdict"></p></header>')

    def inside(self, *, only_points: bool = False) -> bytes:
        """The same without name, headline and commands, which a host shows; `only_points`: as `gathered` has them.

        The host puts it into a frame without an origin, whose name is "driftlens " and, as JSON: `state`, what the
        page's address would say behind its #; `dark`; and `show`: "" for all, "points" or "wall" for that part. The
        page tells it its `height`, its `state`, and as `open` the state that is to be seen in full; the host tells
        the page of another theme, and task: `{dark: true, task: "cars"}`.
        """
        data = gathered(self.run, self._request, only_points=True) if only_points else self._data
        return page({**data, "notes": [_COMMAND.sub(".", text) for text in data["notes"]]})

    @functools.cached_property
    def _data(self) -> dict[str, Any]:
        return gathered(self.run, self._request)

    def __repr__(self) -> str:
        return f"<Explorer of {self.run.id}; `save(path)` writes its page>"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, which may run its script and hand out files, for notebooks."""
        inside = html.escape(self.page.decode())
        allowed = "allow-scripts allow-downloads"
        look = 'width="100%" height="860" style="border:0"'
        return f'<iframe srcdoc="{inside}" sandbox="{allowed}" title="Samples of a run" {look}></iframe>'

    def save(self, path: PathLike | None = None) -> pathlib.Path:
        """Write the page, whole or not at all: to `path`, or beside the run's own reports; returns where.

        Raises:
            DataError: the run has no samples, or not the tasks that are asked for.
            RunError: a table can't be read, or the file can't be written.
            RunLockedError: it goes into the run, and another process is writing there.
        """
        data = self.page
        target = self.run.path / "reports" / "view.html" if path is None else pathlib.Path(path)
        opened = (
            attach(self.run.path, "reports/view.html")
            if path is None
            else atomic_path(target, need=len(data))
        )
        with opened as written:
            written.write_bytes(data)
        return target


def page(data: dict[str, Any], header: str = "") -> bytes:
    """The page that shows what was gathered of a run, below a header, which is HTML of ours."""
    script, style = _read("explorer.js"), _colours() + STYLE + _read("explorer.css")
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    slots = {
        "title": _name(data),
        "policy": policy,
        "style": style,
        "script": script,
        "header": header,
        # Whatever a name holds, it ends no element and no line.
        "data": _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text),
    }
    return _SLOT.sub(lambda slot: slots[slot[1]], _read("explorer.html")).encode("utf-8", "replace")


def _name(data: dict[str, Any]) -> str:
    return html.escape(printable(data["run"]["name"]))


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _colours() -> str:
    """The palette as properties of the page, in the light and the dark theme."""
    light, dark = (_rules(palette(is_dark), CLASSES[is_dark]) for is_dark in (False, True))
    by_system = f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {dark} }} }}"
    by_host = f":root[data-theme=light] {{ color-scheme: light; }} :root[data-theme=dark] {{ {dark} }}"
    forced = ":root[data-theme=dark] { color-scheme: dark; }"
    return f":root {{ color-scheme: light dark; {light} }}\n{by_system}\n{by_host} {forced}\n"


def _rules(theme: Palette, classes: tuple[str, ...]) -> str:
    plain = {name: getattr(theme, name) for name in ("surface", "ink", "quiet", "grid", "gap")}
    rules = {**plain, "scale": ",".join(theme.sequential), "classes": ",".join(classes)}
    rules |= {**theme.tones, **{f"role-{part}": shades[0] for part, shades in theme.roles.items()}}
    return " ".join(f"--{name}: {value};" for name, value in rules.items())
