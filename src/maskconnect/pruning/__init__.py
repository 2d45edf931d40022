"""Pruning: write a frozen network as a plain one without unused modules, and check that it gives the same outputs."""
