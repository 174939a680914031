"""Fixtures of this folder."""

from tests.pipeline.fixtures import finished, spec_file, world

__all__ = ["finished", "spec_file", "world"]
