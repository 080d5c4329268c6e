"""The settings of a run, by subject, from the command line and the recipes.

No module of this package imports torch, so that a mistyped flag is reported before the slow import of torch.
"""

from dualtrain.config.commandline import parse
from dualtrain.config.fields import Setting
from dualtrain.config.recipes import load_recipe, own_settings, recipe_names, run_name
from dualtrain.config.sections import (
    AUTO,
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
from dualtrain.config.without_effect import RunFacts, without_effect

__all__ = [
    "AUTO",
    "MOST_THREADS",
    "SETTINGS",
    "Config",
    "DataSection",
    "LengthSection",
    "ModelSection",
    "OutputSection",
    "RunFacts",
    "RunSection",
    "ScheduleSection",
    "Setting",
    "StepSection",
    "load_recipe",
    "own_settings",
    "parse",
    "recipe_names",
    "run_name",
    "without_effect",
]
