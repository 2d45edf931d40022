"""Passes that make a pruned network faster without changing its function."""
