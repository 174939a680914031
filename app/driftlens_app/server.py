"""The application that `streamlit run` serves, only under its own host names."""

from __future__ import annotations

import os
import re
from importlib.resources import files
from pathlib import Path

import streamlit as st
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from streamlit import net_util

from driftlens_app import views
from driftlens_app.settings import Settings, host_in_url

_PAGES = [file.stem for file in Path(views.__path__[0]).glob("[!_]*.py")]
# Relative to the page, like Streamlit's links to its files, so that it works behind a proxy with a prefix.
_BASE = '<script>window.__streamlit = {BACKEND_BASE_URL: new URL(".", location).href}</script>'


async def _redirect_to_runs_page(request: Request) -> RedirectResponse:
    """Redirect to the page Runs, which Streamlit serves without a name."""
    return RedirectResponse(request.url.replace(path="/"))


async def _page_document(_request: Request) -> HTMLResponse:
    """Return Streamlit's document for a page by its name."""
    # Without the base URL, the client would look for the server below the page's path.
    document = (files("streamlit") / "static" / "index.html").read_text(encoding="utf-8")
    return HTMLResponse(document.replace("<head>", f"<head>{_BASE}", 1), headers={"Cache-Control": "no-cache"})


def _is_same_origin(scope: Scope) -> bool:
    """Return True if the request came from a page of this server: same scheme, name and port."""
    # Streamlit alone would accept requests without an origin, and pages from any port of this machine.
    headers = Headers(scope=scope)
    scheme = {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
    # Browsers omit the origin when they load pages or images, which change nothing.
    origin_needed = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
    origin = headers.get("Origin")
    return not origin_needed if origin is None else origin == f"{scheme}://{headers.get('Host')}"


def _allowed_frame_site() -> str:
    """Return the site that may embed the dashboard in a frame; none by default."""
    # A page could overlay a frame to redirect clicks (clickjacking), so only a read-only dashboard may be framed.
    site = os.environ.get("DRIFTLENS_FRAMED_BY", "") if Settings.from_environment().read_only else ""
    return site if re.fullmatch(r"https://[\w.-]+", site) else "'none'"


class _SameOriginMiddleware:
    """ASGI middleware that refuses cross-origin requests and framing by other sites."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not _is_same_origin(scope):
            refusal = PlainTextResponse("This page is not the dashboard's own.\n", status_code=403)
            await (WebSocketClose(1008) if scope["type"] == "websocket" else refusal)(scope, receive, send)
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Content-Security-Policy"] = f"frame-ancestors {_allowed_frame_site()}"
            await send(message)

        await self.app(scope, receive, send_with_policy)


# Streamlit would ask an external server for this machine's address to compare origins with it.
net_util.get_external_ip = lambda: None

app = st.App(
    Path(__file__).with_name("main.py"),
    routes=[Route("/runs", _redirect_to_runs_page), *(Route(f"/{name}", _page_document) for name in _PAGES)],
    # Streamlit checks host names for its websocket only.
    middleware=[
        Middleware(_SameOriginMiddleware),
        Middleware(
            TrustedHostMiddleware,
            # Streamlit compares an IPv6 address without its brackets, Starlette with them.
            allowed_hosts=[host_in_url(name) for name in st.get_option("server.allowedHosts")],
            www_redirect=False,
        ),
    ],
)
