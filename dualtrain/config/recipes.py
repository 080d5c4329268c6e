"""Recipes: named sets of settings, as TOML files in the package."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from dualtrain.config.sections import Config
from dualtrain.errors import UserError

#: Generic names of functions and modules; they are not used in the name of a run.
_GENERIC = ("build", "data", "dataset", "datasets", "main", "make", "model", "models", "net")


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package, sorted."""
    folder = resources.files("dualtrain") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name: str) -> dict[str, Any]:
    """Return the values that a recipe sets, by setting name (``batch_size``).

    Raises:
        UserError: there is no recipe of that name.
    """
    if name not in recipe_names():
        raise UserError(f"--recipe {name!r} is not known: choose one of {', '.join(recipe_names())}")
    return tomllib.loads(_text(name))


def own_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``settings`` of a run, by name, that differ from those of its recipe."""
    recipe = Config.of(load_recipe(settings["recipe"])).plain()
    return {name: value for name, value in settings.items() if value != recipe[name]}


def recipe_list() -> str:
    """Return one line for each recipe: its name and its first comment."""
    width = max(map(len, recipe_names()))
    return "\n".join(f"{name:{width}}  {_text(name).splitlines()[0].removeprefix('# ')}" for name in recipe_names())


def run_name(recipe: str, dataset: str, model: str) -> str:
    """Return a run's name: its recipe if dataset and model are the recipe's, else its dataset and model.

    Generic names (``_GENERIC``) are left out; if no name remains, the run's name is "own".
    A module that provides dataset and model appears once in the name: ``mine:data`` and ``mine:model`` give ``mine``.
    """
    values = load_recipe(recipe)
    if (values["dataset"], values["model"]) == (dataset, model):
        return recipe
    parts = [*_parts(dataset), *_parts(model)]
    return "-".join(dict.fromkeys(parts)) or "own"


def _parts(name: str) -> list[str]:
    """Return what a dataset or model adds to a run's name: ``pkg.mod:small`` adds ``mod`` and ``small``.

    Generic names add nothing.
    """
    module, _, function = name.partition(":")
    return [part for part in (module.rpartition(".")[2], function) if part and part not in _GENERIC]


def _text(name: str) -> str:
    return (resources.files("dualtrain") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
