"""Data sets: reading, splitting, augmentation and batches."""

from maskconnect.data.augment import Augmentation
from maskconnect.data.batches import Batches, in_memory, mean_of
from maskconnect.data.catalog import ABOUT, NAMES, load
from maskconnect.data.sets import Arrays, Files, Splits

__all__ = ["ABOUT", "NAMES", "Arrays", "Augmentation", "Batches", "Files", "Splits", "in_memory", "load", "mean_of"]
