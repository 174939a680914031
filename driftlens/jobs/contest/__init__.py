"""Many calibrations side by side: settings chosen on held-out samples, and sweeps."""
