"""DriftLens in the places where people merge, evaluate and track; each file needs the library that it is for."""
