"""Prune: write a frozen network as a plain one without its unused modules, and check that it computes the same."""
