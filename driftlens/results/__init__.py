"""Statistics, comparisons, verdicts and projections from the tables of a finished run, without torch."""
