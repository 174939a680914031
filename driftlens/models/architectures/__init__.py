"""One file per family of models: loaders of checkpoints and adapters of live modules."""
