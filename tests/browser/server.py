"""The real server, on a free port of this machine, for as long as a block lasts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from driftlens_app.settings import host_in_url


@contextmanager
def serving(
    root: Path,
    log: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
) -> Iterator[str]:
    """The address of a dashboard on `root`, started as a user starts it; what it prints goes to `log`.

    Args:
        root: a run or a folder of runs.
        log: the file for its output.
        options: further options of `driftlens ui`.
        environment: variables over this process's.
        host: the address of this machine that it listens on.
    """
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "driftlens",
        "ui",
        str(root),
        "--host",
        host,
        "--port",
        str(port),
        "--no-browser",
        *options,
    ]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        address = f"http://{host_in_url(host)}:{port}"
        _wait(server, address, log)
        yield address
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            with urllib.request.urlopen(f"{address}/_stcore/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
