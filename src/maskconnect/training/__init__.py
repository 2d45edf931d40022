"""Training: runs, their checkpoints and their metrics."""
