"""What leaves a run: networks as files that load anywhere, exports, predictions, and what pruning has gained."""
