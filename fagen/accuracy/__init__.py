"""How exact is attention in 8 bits: the numerical-error experiment of FlashAttention-3 (arXiv 2407.08608, section 4.3), on random
tensors with outliers or on a file's, for every way of quantising, with the kernels themselves on a GPU or in the simulator.

`recipes`: the rows of the table. `tensors`: what is fed to them. `run`: reference, prediction and measurement. `result`: what is found.
"""

from __future__ import annotations

from .recipes import SET_BY_RECIPES, Recipe, long_recipes, recipes
from .result import AccuracyResult, AccuracyRow, Errors, Experiment
from .run import Measured, Trial, run_trials
from .table import markdown_table
from .tensors import FileSource, RandomSource, Source

__all__ = [
    "SET_BY_RECIPES",
    "AccuracyResult",
    "AccuracyRow",
    "Errors",
    "Experiment",
    "FileSource",
    "Measured",
    "RandomSource",
    "Recipe",
    "Source",
    "Trial",
    "long_recipes",
    "markdown_table",
    "recipes",
    "run_trials",
]
