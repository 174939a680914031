"""The dashboard on the demo run, read-only, under the name that the Space has; it takes this process's place."""

import os
from pathlib import Path

from driftlens_app.settings import Settings, server_command, server_environment

PORT = 7860
"""What `app_port` of README.md says."""


def command(name: str) -> list[str]:
    """Return the command that starts the server behind a proxy that serves it as `name` over TLS."""
    at = ["--server.allowedHosts", name, "--browser.serverAddress", name, "--browser.serverPort", "443"]
    return [*server_command(host="0.0.0.0", port=PORT, browser=False), *at]


if __name__ == "__main__":
    arguments = command(os.environ.get("SPACE_HOST", "localhost"))
    environment = server_environment(Settings(root=Path("demo").resolve(), read_only=True))
    # The proxy says by which scheme it was asked; the Space's page shows the dashboard in a frame.
    proxied = {"FORWARDED_ALLOW_IPS": "*", "DRIFTLENS_FRAMED_BY": "https://huggingface.co"}
    os.execve(arguments[0], arguments, environment | proxied)
