"""What `streamlit run` serves: the dashboard, to those who ask for it by one of its own names."""

from __future__ import annotations

from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import Route

from driftlens_app.launch import in_url


async def _to_first_page(request: Request) -> RedirectResponse:
    """The page Runs, which Streamlit serves without a name, for those who type its name."""
    return RedirectResponse(request.url.replace(path="/"))


app = st.App(
    Path(__file__).with_name("main.py"),
    routes=[Route("/runs", _to_first_page)],
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
