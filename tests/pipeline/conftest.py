"""Fixtures of this folder."""

from tests.pipeline.fixtures import brief_rehearsals, finished, folder, light, roomy, spec_file, world

__all__ = ["brief_rehearsals", "finished", "folder", "light", "roomy", "spec_file", "world"]
