"""Builds in a fresh folder; everything else stands in pyproject.toml."""

import tempfile

from setuptools import setup
from setuptools.command.build import build


class Build(build):
    """A build that takes nothing from build/, whose leftovers setuptools would put into the wheel too."""

    def initialize_options(self):
        """Choose a folder that nobody has built in."""
        super().initialize_options()
        self.fresh = tempfile.TemporaryDirectory(prefix="driftlens-build-")
        self.build_base = self.fresh.name


setup(cmdclass={"build": Build})
