"""Recipes: strict TOML files that say what to train, on which data and how."""

from maskconnect.recipes.load import load, names
from maskconnect.recipes.schema import Recipe
from maskconnect.recipes.write import write

__all__ = ["Recipe", "load", "names", "write"]
