"""How the server is started: the command line and the environment, for `driftlens ui`."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from driftlens.base.errors import RunError
from driftlens_app.settings import Settings

_HERE = Path(__file__).parent
MOST_FILES = 4096
"""Each page that is open takes a few files of the server, and macOS and many shells allow 256."""
LOCAL_HOSTS = ("localhost", "127.0.0.1")


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def in_url(host: str) -> str:
    """`host` as URLs and the header `Host` write it: in lower case, an IPv6 address short and in brackets."""
    name = _name(host)
    return f"[{name}]" if ":" in name else name


def command(*, host: str = "127.0.0.1", port: int | None = None, browser: bool = True) -> list[str]:
    """The arguments that start the server, program first; without a port it takes the first free one from 8501."""
    options = {
        "server.address": host,
        "server.enableCORS": "true",
        "server.enableXsrfProtection": "true",
        "server.fileWatcherType": "none",
        "server.runOnSave": "false",
        "server.showEmailPrompt": "false",
        "server.maxUploadSize": "1",
        "browser.gatherUsageStats": "false",
        # Streamlit's default would open and print a link to "localhost", which may be another server's on ::1.
        "browser.serverAddress": "localhost" if _is_every_address(host) else in_url(host),
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "type",
        "client.showErrorLinks": "false",
        "runner.magicEnabled": "false",
        # Python collects garbage by itself; to search all of it after every click costs more than the click.
        "runner.postScriptGC": "false",
        "theme.base": str(_HERE / "theme.toml"),
    }
    if port is not None:
        options["server.port"] = str(port)
    if not browser:
        options["server.headless"] = "true"
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    hosts = [part for name in allowed_hosts(host) for part in ("--server.allowedHosts", name)]
    return [sys.executable, "-P", "-m", "streamlit", "run", str(_HERE / "server.py"), *flags, *hosts]


def require_streamlit() -> None:
    """Refuse to start a server that is not installed: whatever else there is does without."""
    if importlib.util.find_spec("streamlit") is None:
        raise RunError(
            "the dashboard needs Streamlit, which is not installed here",
            hint="pip install streamlit; without it `driftlens view RUN` writes a page to explore samples in, and "
            "`driftlens report RUN` one to read.",
        )


def require_free(host: str, port: int) -> None:
    """Refuse a port that another program listens on, or that this one may not."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise RunError(
            f"port {port} of {host} can't be listened on: {error.strerror}",
            hint="Choose another --port, or leave it out: the first free one from 8501 is taken.",
        ) from None


def allow_files() -> int:
    """How many files this process and what follows it may open, after as many were asked for as there is a right to."""
    try:
        import resource
    except ImportError:  # Windows has no such bound
        return MOST_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (MOST_FILES if bound == resource.RLIM_INFINITY else bound for bound in (soft, hard))
    if soft < min(most, MOST_FILES):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, MOST_FILES), hard))
            soft = min(most, MOST_FILES)
    return soft


def allowed_hosts(host: str) -> Sequence[str]:
    """Names under which a browser may ask for the app, as Streamlit compares them; any other was rebound to it."""
    others = () if is_local(host) else (socket.gethostname(), *_addresses(host))
    return tuple(dict.fromkeys(map(_name, (*LOCAL_HOSTS, host, *others))))


def environment(settings: Settings) -> dict[str, str]:
    """The environment of the server: this process's, the settings, and nothing that would override a flag."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STREAMLIT_")}
    return {**inherited, **settings.environment()}


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` is, without the zone that only this machine knows; None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _name(host: str) -> str:
    """`host` as browsers spell it."""
    return str(_address(host) or host.lower())


def _is_every_address(host: str) -> bool:
    """Whether `host` stands for all addresses of this machine, as 0.0.0.0 does."""
    address = _address(host)
    return address is not None and address.is_unspecified


def _addresses(host: str) -> list[str]:
    """This machine's own addresses, where `host` stands for all of them."""
    if not _is_every_address(host):
        return []
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in families
    ]
