"""What `streamlit run` serves: the dashboard, to those who ask for it by one of its own names."""

from __future__ import annotations

import pkgutil
from importlib.resources import files
from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Route

from driftlens_app import views
from driftlens_app.launch import in_url

_FIRST = "runs"
# Relative to the page, as Streamlit's own links to its files, so that it holds behind a proxy's prefix too.
_BASE = '<script>window.__streamlit = {BACKEND_BASE_URL: new URL(".", location).href}</script>'


async def _to_first_page(request: Request) -> RedirectResponse:
    """The page Runs, which Streamlit serves without a name, for those who type its name."""
    return RedirectResponse(request.url.replace(path="/"))


async def _page(_request: Request) -> HTMLResponse:
    """Streamlit's document for a page that is opened by its name.

    Left alone, the client takes the page's name for a folder that the app may lie in, asks there for the server's
    health, and the browser logs that it is not found.
    """
    document = (files("streamlit") / "static" / "index.html").read_text(encoding="utf-8")
    return HTMLResponse(
        document.replace("<head>", f"<head>{_BASE}", 1), headers={"Cache-Control": "no-cache"}
    )


# The modules' names, not `pages()`: the server need not import what its visitors look at.
_names = [module.name for module in pkgutil.iter_modules(views.__path__) if module.name != _FIRST]
app = st.App(
    Path(__file__).with_name("main.py"),
    routes=[Route(f"/{_FIRST}", _to_first_page), *(Route(f"/{name}", _page) for name in _names)],
    # Streamlit refuses strange names for its websocket alone.
    middleware=[
        Middleware(
            TrustedHostMiddleware,
            # Streamlit compares an IPv6 address without its brackets, Starlette with them.
            allowed_hosts=[in_url(name) for name in st.get_option("server.allowedHosts")],
            www_redirect=False,
        )
    ],
)
