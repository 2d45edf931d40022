"""Add masks to an existing model and continue its training."""
