"""Fixtures of this folder."""

from tests.pipeline.fixtures import brief_rehearsals, finished, folder, light, spec_file, world

__all__ = ["brief_rehearsals", "finished", "folder", "light", "spec_file", "world"]
