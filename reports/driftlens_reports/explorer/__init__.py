"""The explorer: one page in which the samples of a run move from model to model, are chosen, counted and exported."""
