"""What a finished run says: statistics, comparisons, verdicts and projections of its tables, without torch."""
