"""Use trained networks: save, load, export, predict, prune and measure."""
