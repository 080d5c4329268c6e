"""Recipes: named sets of settings, as YAML files in the package."""

from __future__ import annotations

from importlib import resources
from typing import Any

from dualtrain.errors import UserError


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    folder = resources.files("dualtrain") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(name: str) -> dict[str, Any]:
    """The values that a recipe sets, by field name.

    Raises:
        UserError: there is no recipe of that name.
    """
    import yaml

    if name not in recipe_names():
        raise UserError(f"--recipe {name!r} is not known: choose one of {', '.join(recipe_names())}")
    values: dict[str, Any] = yaml.safe_load(_text(name))
    return values


def recipe_list() -> str:
    """The recipes with what they say of themselves, for people."""
    width = max(map(len, recipe_names()))
    return "\n".join(f"{name:{width}}  {_text(name).splitlines()[0].removeprefix('# ')}" for name in recipe_names())


def _text(name: str) -> str:
    return (resources.files("dualtrain") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
