"""The packaged look of figures: one sheet per venue width, the same colours, markers and hatches everywhere."""

from __future__ import annotations

import contextlib
import io
import pathlib
import threading
import warnings
from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = MappingProxyType({"neurips": 5.5, "icml-column": 3.25, "slide": 10.0})
"""Width of each venue's text or column, in inches."""

PAGE = "page"
"""The style of pictures that are read on a screen."""

FORMATS = ("pdf", "svg", "png")

_UNDATED: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
# matplotlib's settings are global; a server may draw in several threads.
_SETTINGS = threading.RLock()


def venue_of(width: float) -> str:
    """The venue whose width is nearest, and whose sheet therefore fits a figure of `width` inches."""
    return min(WIDTHS, key=lambda venue: abs(WIDTHS[venue] - width))


@contextlib.contextmanager
def sheet(venue: str) -> Iterator[None]:
    """Within it, matplotlib's settings are those packaged for a venue or a `PAGE`; missing letters are boxes."""
    import matplotlib.style

    folder = pathlib.Path(__file__).parent
    files = [folder / f"{name}.mplstyle" for name in ("common", venue)]
    with _SETTINGS, matplotlib.style.context(files, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


def settle(figure: Figure) -> None:
    """Lay a figure out once and then leave it alone: every format, and every later save, shows the same places."""
    from matplotlib.figure import SubFigure

    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")
    # The layout's solver ends in other last digits from time to time.
    for part in figure.findobj(SubFigure):
        part.bbox_relative.set_points(part.bbox_relative.get_points().round(5))
    for axes in figure.axes:
        axes.set_position([round(part, 5) for part in axes.get_position(original=True).bounds])


def encode(figure: Figure, file_format: str, venue: str | None = None) -> bytes:
    """A figure's bytes as pdf, svg or png, the same at every call; on a `PAGE` letters of an SVG stay letters."""
    assert file_format in FORMATS, file_format
    written = io.BytesIO()
    with sheet(venue or venue_of(figure.get_figwidth())):
        figure.savefig(written, format=file_format, metadata=_UNDATED[file_format])
    return written.getvalue()
