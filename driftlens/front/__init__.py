"""The front doors from Python: the verbs as functions, estimators, the paper's figures and tables."""
