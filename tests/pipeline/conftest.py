"""Fixtures of this folder."""

from tests.pipeline.fixtures import finished, light, spec_file, world

__all__ = ["finished", "light", "spec_file", "world"]
