"""What `streamlit run` serves: the dashboard, to those who ask for it by one of its own names."""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import streamlit as st
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from streamlit import file_util, net_util

from driftlens_app import views
from driftlens_app.launch import in_url
from driftlens_app.settings import Settings

_FIRST = "runs"
_NO_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>No such page - DriftLens</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<main style="font: 16px/1.6 sans-serif; max-width: 32em; margin: 4em auto; padding: 0 1em"><h1>No such page</h1>
<p>DriftLens has no page at this address. There are:</p><ul>{}</ul></main></html>"""
# Relative to the page, as Streamlit's own links to its files, so that it holds behind a proxy's prefix too.
_BASE = '<script>window.__streamlit = {BACKEND_BASE_URL: new URL(".", location).href}</script>'


_LIBRARIES = ("pandas", "plotly.graph_objects", "scipy.special", "sklearn.neighbors", "sklearn.decomposition")
_OWN_FILES = [file.name for file in Path(file_util.get_static_dir()).iterdir()]
_STREAMLITS = ("_stcore", "media", "component", "app/static", *_OWN_FILES)
"""First parts of addresses that Streamlit answers itself; it shows its own page at any other."""


async def _to_first_page(request: Request) -> RedirectResponse:
    """The page Runs, which Streamlit serves without a name, for those who type its name."""
    return RedirectResponse(request.url.replace(path="/"))


async def _page(_request: Request) -> HTMLResponse:
    """Streamlit's document for a page by its name, whose client else asks for health in a folder of that name."""
    document = (files("streamlit") / "static" / "index.html").read_text(encoding="utf-8")
    return HTMLResponse(
        document.replace("<head>", f"<head>{_BASE}", 1), headers={"Cache-Control": "no-cache"}
    )


async def _no_page(request: Request) -> HTMLResponse:
    """Our own words where Streamlit would show its first page, and a box in front of it."""
    top = "../" * (request.url.path.strip("/").count("/")) or "./"
    listed = "".join(
        f'<li><a href="{top}{name}">{name.replace("_", " ").capitalize()}</a>' for name in _pages
    )
    return HTMLResponse(_NO_PAGE.format(listed), status_code=404)


@asynccontextmanager
async def _reading_ahead(_app: st.App) -> AsyncIterator[None]:
    """Read the largest libraries of the first page while its visitor's browser reads Streamlit's scripts."""
    threading.Thread(target=lambda: [*map(importlib.import_module, _LIBRARIES)], daemon=True).start()
    yield


def _is_own(scope: Scope) -> bool:
    """Whether a page of this very server asks: same scheme, name and port, which no other page's browser can claim.

    Streamlit would let in whoever leaves the origin out, and pages of any port of this machine.
    """
    headers = Headers(scope=scope)
    scheme = {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
    # Browsers leave it out where a page is opened or a picture is shown, which changes nothing.
    origin_needed = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
    origin = headers.get("Origin")
    return not origin_needed if origin is None else origin == f"{scheme}://{headers.get('Host')}"


def _framed_by() -> str:
    """Whose frames it shows in: nobody's, as a click might not be meant for it; where it can do nothing, a site's."""
    site = os.environ.get("DRIFTLENS_FRAMED_BY", "") if Settings.from_environment().read_only else ""
    return site if re.fullmatch(r"https://[\w.-]+", site) else "'none'"


class _OwnAnswers:
    """Pages of others get no answer, and none shows inside their frames, but see `_framed_by`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not _is_own(scope):
            refusal = PlainTextResponse("This page is not the dashboard's own.\n", status_code=403)
            await (WebSocketClose(1008) if scope["type"] == "websocket" else refusal)(scope, receive, send)
            return

        async def alone(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Content-Security-Policy"] = f"frame-ancestors {_framed_by()}"
            await send(message)

        await self.app(scope, receive, alone)


# Streamlit would ask a server of others for this machine's address, to compare a foreign page's origin with it.
net_util.get_external_ip = lambda: None


class _Elsewhere(StringConvertor):
    """An address of one or several parts that is none of Streamlit's own; it leads one with a slash at its end on."""

    regex = f"(?!(?:{'|'.join(map(re.escape, _STREAMLITS))})(?:/|$))[^/]+(?:/+[^/]+)*"


register_url_convertor("elsewhere", _Elsewhere())
# What declares a page says so in its text: the server need not import what its visitors look at.
_files = sorted(Path(views.__path__[0]).glob("*.py"))
_pages = [file.stem for file in _files if "\nPAGE = " in file.read_text(encoding="utf-8")]
app = st.App(
    Path(__file__).with_name("main.py"),
    routes=[
        Route(f"/{_FIRST}", _to_first_page),
        *(Route(f"/{name}", _page) for name in _pages if name != _FIRST),
        Route("/{name:elsewhere}", _no_page),
    ],
    lifespan=_reading_ahead,
    # Streamlit refuses strange names for its websocket alone.
    middleware=[
        Middleware(_OwnAnswers),
        Middleware(
            TrustedHostMiddleware,
            # Streamlit compares an IPv6 address without its brackets, Starlette with them.
            allowed_hosts=[in_url(name) for name in st.get_option("server.allowedHosts")],
            www_redirect=False,
        ),
    ],
)
