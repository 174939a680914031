"""Builds in a fresh folder, under the version that the git tag says; everything else stands in pyproject.toml."""

import re
import subprocess
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build

HERE = Path(__file__).resolve().parent
FIRST = "0.1.0"
"""The version before there is a tag."""


class Build(build):
    """A build that takes nothing from build/, whose leftovers setuptools would put into the wheel too."""

    def initialize_options(self):
        """Choose a folder that nobody has built in."""
        super().initialize_options()
        self.fresh = tempfile.TemporaryDirectory(prefix="driftlens-build-")
        self.build_base = self.fresh.name


def version():
    """Return the version of an sdist, else that of the tag `v1.2.3`.

    Commits after the tag have `1.2.4.dev5+g0a1b2c3`, which sorts before 1.2.4."""
    told = HERE / "PKG-INFO"
    if told.is_file():
        return re.search(r"^Version: (\S+)$", told.read_text("utf-8"), re.MULTILINE)[1]
    if not (HERE / ".git").exists():  # another repository may lie around this folder
        return FIRST
    describe = ["git", "describe", "--tags", "--long", "--match", "v[0-9]*"]
    try:
        said = subprocess.run(describe, cwd=HERE, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return FIRST
    parts = re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)-(\d+)-g([0-9a-f]+)", said.strip())
    if parts is None:
        raise SystemExit(f"the tag in {said.strip()} is no version such as v1.2.3")
    major, minor, patch, since, commit = parts.groups()
    if since == "0":
        return f"{major}.{minor}.{patch}"
    return f"{major}.{minor}.{int(patch) + 1}.dev{since}+g{commit}"


setup(version=version(), cmdclass={"build": Build})
