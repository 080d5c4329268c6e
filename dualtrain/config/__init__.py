"""The settings of a run, from the command line and the recipes.

Nothing here imports torch, so that a mistyped flag is answered at once.
"""

from dualtrain.config.commandline import FIELDS, flag, parse
from dualtrain.config.recipes import load_recipe, recipe_names
from dualtrain.config.sections import Config

__all__ = ["FIELDS", "Config", "flag", "load_recipe", "parse", "recipe_names"]
