"""What DriftLens reads from outside, spoiled at random: specs, checkpoints, data, run folders, command lines."""
