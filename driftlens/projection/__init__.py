"""Features of a saved run on a plane: expert, merged and calibrated in one layout, with what the layout loses.

A layout is fitted once per task on all of them together, so that distances between panels mean the same, and stored in
the run: the coordinates are what is kept, not the seed that a library may one day treat otherwise. Distances on the
plane are indicative only; every quality number comes from the features themselves.
"""

from driftlens.projection.projecting import project, stored_projection
from driftlens.projection.settings import METHODS, FitOn, Method
from driftlens.projection.store import Projection

__all__ = ["METHODS", "FitOn", "Method", "Projection", "project", "stored_projection"]
