"""The sections of a report, one file each: from a run to sentences and tables."""
