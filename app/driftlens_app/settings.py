"""Settings of the dashboard and of its server. Nothing outside its root folder is read or written."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from driftlens.runs.manifest import MANIFEST
from driftlens.utils.errors import RunError

_HERE = Path(__file__).parent
_ROOT, _READ_ONLY = "DRIFTLENS_APP_ROOT", "DRIFTLENS_APP_READ_ONLY"
_ANY_ADDRESS = ("0.0.0.0", "::")
_HINT = "Remove the link, or replace it by a copy."


@dataclass(frozen=True)
class Settings:
    """Dashboard settings: the root folder of runs, and `read_only` if no jobs may be started."""

    root: Path
    read_only: bool = False

    @property
    def is_single_run(self) -> bool:
        """True if the root is itself a run, so that no run can be added."""
        return (self.root / MANIFEST).is_file()

    def environment(self) -> dict[str, str]:
        """Return the environment variables that pass these settings to the server process."""
        return {_ROOT: str(self.root), _READ_ONLY: "1" if self.read_only else ""}

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the settings from environment variables; by default the current folder, read-only."""
        root = os.environ.get(_ROOT)
        return cls(
            root=Path(root or ".").resolve(),
            read_only=root is None or os.environ.get(_READ_ONLY, "") == "1",
        )


def is_inside(path: Path, root: Path | None = None) -> bool:
    """Return True if `path` is inside `root` (default: the dashboard's) after all links are resolved."""
    try:
        # Unlike `Path.resolve`, this accepts links in a cycle.
        real = os.path.realpath(path)
    # Names with null characters, or too long ones, exist nowhere.
    except (OSError, ValueError):
        return False
    return Path(real).is_relative_to(Settings.from_environment().root if root is None else root)


def require_root_exists(root: Path) -> None:
    """Raise RunError if the root folder no longer exists."""
    if not root.is_dir():
        raise RunError(
            f"the dashboard's folder {root} is gone",
            hint="Restore it, or open another one: `driftlens ui FOLDER`.",
        )


def is_file_inside(path: Path) -> bool:
    """Return True if `path` is a regular file inside the root; pipes, which could block, are refused."""
    # Most files do not exist, and `is_file` is faster than resolving links.
    return path.is_file() and is_inside(path)


def require_inside(path: Path) -> None:
    """Raise RunError if a path is outside the root after all links are resolved."""
    if not is_inside(path):
        raise RunError(f"{path} leads outside this folder through a link", hint=_HINT)


def require_links_inside(run: Path, root: Path) -> None:
    """Raise RunError if a link in a run leads outside the root. Slow, so results should be cached."""

    def raise_unsearchable(error: OSError) -> None:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            # A running job has removed it.
            return
        name = os.path.relpath(error.filename, run)
        raise RunError(
            f"its folder {name} can't be searched for links: {error.strerror}", hint="Check its permissions."
        ) from error

    seen: set[str] = set()
    for folder, folders, files in os.walk(run, followlinks=True, onerror=raise_unsearchable):
        real = os.path.realpath(folder)
        # Links may form a cycle.
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in sorted([*folders, *files]):
            path = Path(folder, name)
            if path.is_symlink() and not is_inside(path, root):
                raise RunError(f"its {path.relative_to(run)} is a link that leaves the folder {root}", hint=_HINT)


def is_local_host(host: str) -> bool:
    """Return True if a server that listens on `host` can be reached only from this machine."""
    address = _parse_ip_address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def host_in_url(host: str) -> str:
    """Format a host name as in URLs: lower case, IPv6 addresses short and in brackets."""
    name = _normalized_host(host)
    return f"[{name}]" if ":" in name else name


def server_command(*, host: str = "127.0.0.1", port: int | None = None, browser: bool = True) -> list[str]:
    """Return the command line that starts the Streamlit server.

    Args:
        host: address to listen on.
        port: port to listen on; None for the first free one from 8501.
        browser: True to open a browser.
    """
    options = {
        "server.address": host,
        "server.enableCORS": "true",
        "server.enableXsrfProtection": "true",
        "server.fileWatcherType": "none",
        "server.runOnSave": "false",
        "server.showEmailPrompt": "false",
        "server.maxUploadSize": "1",
        "browser.gatherUsageStats": "false",
        # Streamlit's default link to "localhost" may reach another server that listens on ::1.
        "browser.serverAddress": "localhost" if _normalized_host(host) in _ANY_ADDRESS else host_in_url(host),
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "type",
        "client.showErrorLinks": "false",
        "runner.magicEnabled": "false",
        # A full collection after every click takes longer than handling the click.
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


def allowed_hosts(host: str) -> Sequence[str]:
    """Return the host names under which the server accepts requests."""
    # Any other name points to this server by DNS rebinding.
    others = () if is_local_host(host) else (socket.gethostname(), *_machine_addresses(host))
    return tuple(dict.fromkeys(map(_normalized_host, ("localhost", "127.0.0.1", host, *others))))


def server_environment(settings: Settings) -> dict[str, str]:
    """Return the server's environment variables, with the settings and without Streamlit overrides."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STREAMLIT_")}
    return {**inherited, **settings.environment()}


def _parse_ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address without its zone; None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _normalized_host(host: str) -> str:
    """Normalize a host name as browsers do."""
    return str(_parse_ip_address(host) or host.lower())


def _machine_addresses(host: str) -> list[str]:
    """Return all addresses of this machine if `host` is an unspecified address such as 0.0.0.0; else none."""
    if _normalized_host(host) not in _ANY_ADDRESS:
        return []
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in families
    ]
