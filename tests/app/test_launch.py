"""The launcher: what it passes on, who gets in, and that the app never imports torch."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from email.message import Message
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from driftlens.cli import main
from driftlens_app import processes
from driftlens_app.settings import Settings, allowed_hosts, host_in_url, is_local_host, server_command
from driftlens_app.show import pages
from tests.app.conftest import MAIN
from tests.browser.server import free_port, serving
from tests.runs.full_run import write_full_run


@pytest.fixture(scope="module")
def outside() -> Iterator[socket.socket]:
    """The only way out: a proxy that hears of every address of another machine that the server asks for."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, outside: socket.socket) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("launch")
    write_full_run(folder / "runs" / "full")
    proxy = f"http://127.0.0.1:{outside.getsockname()[1]}"
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), proxy)
    with serving(folder / "runs", folder / "log", environment={**proxies, "no_proxy": ""}) as address:
        yield address


def answer(url: str, path: str, headers: dict[str, str], method: str = "GET") -> int:
    """Status of a websocket handshake or an ordinary request."""
    place = urlsplit(url)
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(connection.recv(64).split()[1])


def handshake(url: str, **headers: str) -> int:
    key = base64.b64encode(os.urandom(16)).decode()
    wanted = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": key}
    return answer(url, "/_stcore/stream", {**wanted, "Sec-WebSocket-Version": "13", **headers})


def test_the_server_listens_on_this_machine_only(url: str) -> None:
    port = urlsplit(url).port
    listening = [
        connection.laddr.ip
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert listening == ["127.0.0.1"]


def test_a_foreign_host_or_origin_gets_no_session(url: str, outside: socket.socket) -> None:
    """And no other machine is asked for this one's address to compare the origin of a foreign page with it."""
    own = urlsplit(url).netloc
    assert handshake(url, Host=own, Origin=url) == 101
    assert handshake(url, Host="evil.example", Origin="http://evil.example") == 400
    assert handshake(url, Host=own, Origin="http://evil.example") == 403
    with pytest.raises(BlockingIOError):
        outside.accept()


@pytest.mark.parametrize(
    "page",
    [
        None,
        "null",
        "http://{name}:{other}",
        "http://{name}",
        "https://{name}:{port}",
        "http://localhost:{port}",
        "http://0.0.0.0:{port}",
        "http://192.168.0.1:{port}",
        "http://{name}:{port}@evil.example",
        "http://{name}:{port}/",
    ],
)
def test_a_page_at_another_port_or_address_of_this_machine_gets_no_session_and_no_answer(
    url: str, page: str | None
) -> None:
    """Streamlit compares names alone, and lets in whoever names no origin: such a page could start and delete."""
    place = urlsplit(url)
    parts = {"name": place.hostname, "port": place.port, "other": free_port()}
    asked = {"Host": place.netloc} | ({} if page is None else {"Origin": page.format(**parts)})
    assert handshake(url, **asked) == 403
    assert answer(url, "/_stcore/host-config", asked) == (200 if page is None else 403)
    assert answer(url, "/_stcore/upload_file/a/b", asked, "PUT") == 403
    own = {"Host": place.netloc, "Origin": url}
    assert handshake(url, **own) == 101 and answer(url, "/_stcore/host-config", own) == 200


def test_behind_a_proxy_with_tls_the_own_page_is_the_proxys(url: str) -> None:
    """It says so in X-Forwarded-Proto, which no page can send along with a websocket."""
    asked = {"Host": "localhost", "Origin": "https://localhost"}
    assert [handshake(url, **asked), handshake(url, **asked, **{"X-Forwarded-Proto": "https"})] == [403, 101]


@pytest.mark.parametrize("path", ["", "overview", "no_such_page", "calibrate", "_stcore/health"])
def test_no_answer_may_be_shown_in_anothers_frame(url: str, path: str) -> None:
    _, headers, _ = got(f"{url}/{path}")
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"


def got(address: str) -> tuple[int, Message, str]:
    """Status, headers and text of the answer to a request, which is not led on."""
    place = urlsplit(address)
    with closing(HTTPConnection(place.hostname or "", place.port, timeout=30)) as connection:
        connection.request("GET", f"{place.path}?{place.query}")
        found = connection.getresponse()
        return found.status, found.headers, found.read().decode()


def test_a_foreign_host_is_refused_before_anything_else(url: str) -> None:
    own = urlsplit(url).netloc
    for path in ("/", "/overview", "/runs", "/_stcore/health", "/_stcore/host-config"):
        assert answer(url, path, {"Host": own}) in (200, 307)
        assert answer(url, path, {"Host": "evil.example"}) == 400
        assert answer(url, path, {}) == 400


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_the_server_lets_its_own_visitors_in_over_ipv6(tmp_path: Path) -> None:
    with serving(tmp_path, tmp_path / "log", host="::1") as address:
        own = urlsplit(address).netloc
        assert own.startswith("[::1]:") and answer(address, "/", {"Host": own}) in (200, 307)
        assert handshake(address, Host=own, Origin=address) == 101
        assert answer(address, "/", {"Host": "[::2]"}) == 400
        assert f"URL: {address}" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("host", "name", "written"),
    [
        ("::1", "::1", "[::1]"),
        ("0:0:0:0:0:0:0:1", "::1", "[::1]"),
        ("FE80::A%eth0", "fe80::a", "[fe80::a]"),
        ("192.0.2.1", "192.0.2.1", "192.0.2.1"),
        ("Box.Example", "box.example", "box.example"),
    ],
)
def test_a_host_is_allowed_as_browsers_spell_it(host: str, name: str, written: str) -> None:
    assert name in allowed_hosts(host) and host_in_url(host) == written


def test_the_apps_own_files_are_not_served(url: str) -> None:
    for path in ("/main.py", "/theme.toml", "/static/../main.py"):
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=30) as response:
                assert b"driftlens" not in response.read().lower()
        except urllib.error.HTTPError as error:
            assert error.code in (400, 403, 404)


def test_the_command_keeps_the_safe_settings() -> None:
    command = server_command(port=8765, browser=False)
    flags = command[next(at for at, part in enumerate(command) if part.startswith("--")) :]
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    assert "-P" in command, "else the current folder's files would be imported for libraries"
    assert options["--server.address"] == "127.0.0.1" and options["--server.port"] == "8765"
    assert options["--server.enableXsrfProtection"] == options["--server.enableCORS"] == "true"
    assert options["--browser.gatherUsageStats"] == "false" and options["--server.maxUploadSize"] == "1"
    assert options["--runner.postScriptGC"] == "false", "more than half of what a click costs"
    assert options["--server.fileWatcherType"] == "none" and options["--client.toolbarMode"] == "minimal"
    assert "*" not in allowed_hosts("127.0.0.1") and "*" not in allowed_hosts("0.0.0.0")


@pytest.mark.parametrize(
    ("host", "printed"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("192.0.2.1", "192.0.2.1"),
        ("2001:DB8::1", "[2001:db8::1]"),
        ("Box.Example", "box.example"),
        ("0.0.0.0", "localhost"),
        ("::", "localhost"),
    ],
)
def test_the_printed_link_leads_to_an_address_that_is_listened_on(host: str, printed: str) -> None:
    command = server_command(host=host)
    assert command[command.index("--browser.serverAddress") + 1] == printed


def test_every_option_is_one_that_streamlit_knows() -> None:
    from streamlit import config

    known = {f"--{name}" for name in config.get_config_options()}
    assert {part for part in server_command() if part.startswith("--")} <= known


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("example.org", False),
    ],
)
def test_only_loopback_is_local(host: str, expected: bool) -> None:
    assert is_local_host(host) is expected


@pytest.mark.parametrize(
    ("options", "read_only"),
    [
        ([], False),
        (["--read-only"], True),
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--allow-remote-jobs"], False),
        (["--host", "0.0.0.0", "--allow-remote-jobs", "--read-only"], True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_another_host_warns_and_looks_only_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: list[str],
    read_only: bool,
) -> None:
    started: list[Settings] = []

    def execve(_program: str, _arguments: list[str], environment: dict[str, str]) -> None:
        with monkeypatch.context() as patch:
            for name in Settings(tmp_path).environment():
                patch.setenv(name, environment[name])
            started.append(Settings.from_environment())

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(SystemExit) as leaving:
        main(["ui", str(tmp_path), *options])
    assert leaving.value.code == 0
    assert started == [Settings(tmp_path.resolve(), read_only)]
    assert ("no login" in capsys.readouterr().err) is ("--host" in options)


def test_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["ui", str(tmp_path / "nosuch")])
    assert leaving.value.code == 4 and "is not a folder" in capsys.readouterr().err


WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, Blocked())
from streamlit.testing.v1 import AppTest
app = AppTest.from_file(sys.argv[1], default_timeout=300).run()
for view in sys.argv[2:]:
    app.switch_page(view).run()
    assert app.title and not app.exception and not app.error, (view, app.exception, app.error)
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers", "open_clip", "torchvision")]
"""


@pytest.mark.slow
def test_every_page_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    write_full_run(tmp_path / "runs" / "full")
    environment = {**os.environ, **Settings((tmp_path / "runs").resolve()).environment()}
    command = [sys.executable, "-c", WITHOUT_TORCH, str(MAIN), *pages()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_modules_that_lie_among_the_runs_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('code from the folder of the runs')")
    done = processes.run_command(["--help"], tmp_path)
    assert done.returncode == 0 and not done.stderr
