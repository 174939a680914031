"""Errors on a page: what happened and what to do; the traceback goes to the server's log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import streamlit as st

from driftlens.errors import DriftLensError
from driftlens_app.texts import plain

_LOG = logging.getLogger("driftlens_app")
_DEFECT = "This is a defect of DriftLens; the traceback is in the log of `driftlens ui`."


@contextmanager
def shown_errors() -> Iterator[None]:
    """Whatever fails inside the block is shown in its place, and the rest of the page stays."""
    try:
        yield
    except DriftLensError as error:
        _LOG.info("page shows an error", exc_info=error)
        show_error(type(error).__name__, error.message, error.hint)
    except Exception as error:
        _LOG.exception("page failed")
        # The message may quote anything that the code had in its hands; the type is enough for a report.
        show_error(type(error).__name__, "", "")
        st.caption(_DEFECT)


def show_error(kind: str, message: str, hint: str) -> None:
    """An error box: type, message and hint; further lines of a message, one problem each, as a list."""
    first, *further = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    head = f"**{plain(kind)}**" + (f": {plain(first)}" if first else "")
    parts = (head, "\n".join(f"- {plain(line)}" for line in further), plain(" ".join(hint.split())))
    st.error("\n\n".join(filter(None, parts)), icon=":material/error:")
