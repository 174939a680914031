"""The dashboard: a saved run to look at, and calibrations to start; it computes nothing itself."""
