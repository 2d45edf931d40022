"""Callbacks and helpers for the libraries that people train with; each file needs its own library only."""
