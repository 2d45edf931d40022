"""Recipes: what to train, on what, and how, as strict TOML."""

from maskconnect.recipes.load import load, names
from maskconnect.recipes.schema import Recipe
from maskconnect.recipes.write import write

__all__ = ["Recipe", "load", "names", "write"]
