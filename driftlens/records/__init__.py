"""Names by which notebooks know rooms of today: `driftlens.runs` and `driftlens.findings`."""
