"""Training: a run, its checkpoints and its log."""
