"""Fixtures of this folder."""

from tests.pipelines.fixtures import finished, folder, light, roomy, spec_file, world

__all__ = ["finished", "folder", "light", "roomy", "spec_file", "world"]
