"""The settings of a run, by subject, from the command line and the recipes.

Nothing here imports torch: a mistyped flag is reported before torch is loaded.
"""

from dualtrain.config.commandline import parse
from dualtrain.config.fields import Setting
from dualtrain.config.recipes import load_recipe, recipe_names
from dualtrain.config.sections import (
    MOST_THREADS,
    SETTINGS,
    Config,
    DataSection,
    LengthSection,
    ModelSection,
    OutputSection,
    RunSection,
    ScheduleSection,
    StepSection,
)

__all__ = [
    "MOST_THREADS",
    "SETTINGS",
    "Config",
    "DataSection",
    "LengthSection",
    "ModelSection",
    "OutputSection",
    "RunSection",
    "ScheduleSection",
    "Setting",
    "StepSection",
    "load_recipe",
    "parse",
    "recipe_names",
]
