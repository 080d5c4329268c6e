"""One typed configuration, and the command line that is made from it.

A value comes from the flag, else from the recipe, else from the default below. Nothing here imports torch, so that a
mistyped flag is answered at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NoReturn

from dualtrain.errors import UserError


@dataclass(frozen=True)
class Bounds:
    """Which values a flag takes, in words and as a test."""

    words: str
    accepts: Callable[[Any], bool]


def one_of(*choices: str) -> Bounds:
    """Exactly these values."""
    return Bounds(f"one of {', '.join(choices)}", lambda value: value in choices)


def at_least(low: float) -> Bounds:
    """This number or more."""
    return Bounds(f"{low:g} or more", lambda value: math.isfinite(value) and value >= low)


def between(low: float, high: float) -> Bounds:
    """From ``low`` to ``high``."""
    return Bounds(f"from {low:g} to {high:g}", lambda value: low <= value <= high)


ABOVE_ZERO = Bounds("above 0", lambda value: math.isfinite(value) and value > 0)
UNIT = Bounds("from 0 to below 1", lambda value: 0 <= value < 1)


def option(default: Any, help: str, bounds: Bounds | None = None) -> Any:
    """A field of :class:`Config` that is a flag too."""
    return dataclasses.field(default=default, metadata={"help": help, "bounds": bounds})


@dataclass(frozen=True)
class Config:
    """Everything that decides how a run goes."""

    backend: str = option(
        "auto", "auto (what the launcher implies), torch, horovod or local", one_of("auto", "torch", "horovod", "local")
    )
    recipe: str = option("digits-convnet", "the named set of defaults that the other flags override")
    dataset: str = option("digits", "what to train on: digits (embedded), or mnist or fashion-mnist in --data-dir")
    data_dir: str | None = option(None, "the folder that holds the dataset's files")
    model: str = option("convnet", "what to train: convnet")
    epochs: int = option(1, "passes over the training samples", at_least(1))
    max_steps: int | None = option(None, "stop after this many optimizer steps", at_least(1))
    batch_size: int | None = option(None, "samples a step on each rank", at_least(1))
    global_batch_size: int | None = option(None, "samples a step on all ranks together", at_least(1))
    optimizer: str = option("sgd", "sgd, adam or adamw", one_of("sgd", "adam", "adamw"))
    lr: float = option(0.1, "learning rate, never scaled behind your back", ABOVE_ZERO)
    momentum: float = option(0.0, "momentum of sgd", UNIT)
    weight_decay: float = option(0.0, "weight decay", at_least(0))
    seed: int = option(0, "decides the first weights and the order of samples", between(0, 2**32 - 1))
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N")
    run_dir: str | None = option(None, "the run's folder (default: a new one below runs/)")
    resume: str | None = option(None, "go on from --run-dir's newest good checkpoint, or from this file")
    checkpoint_every: int | None = option(
        None, "optimizer steps between checkpoints, beside those of each epoch", at_least(1)
    )
    log_every: int = option(10, "optimizer steps between lines of metrics.jsonl", at_least(1))
    timeout: float = option(300.0, "seconds that any wait for another rank lasts at most", between(0.1, 1e6))

    def global_batch(self, size: int) -> int:
        """Samples a step on all of ``size`` ranks."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        assert self.batch_size is not None
        return self.batch_size * size


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}


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
    text = (resources.files("dualtrain") / "recipes" / f"{name}.yaml").read_text()
    values: dict[str, Any] = yaml.safe_load(text)
    return values


class _Parser(argparse.ArgumentParser):
    """argparse, with errors raised as ours."""

    def error(self, message: str) -> NoReturn:
        for word in message.split():
            near = difflib.get_close_matches(word, [flag(name) for name in _FIELDS], n=1)
            if message.startswith("unrecognized") and near:
                message += f" (did you mean {near[0]}?)"
                break
        raise UserError(f"{message}; see python -m dualtrain.main --help")


def flag(name: str) -> str:
    """``run_dir`` → ``--run-dir``."""
    return "--" + name.replace("_", "-")


def _type(field: dataclasses.Field[Any]) -> type:
    return {"int": int, "float": float}.get(str(field.type).removesuffix(" | None"), str)


def _convert(field: dataclasses.Field[Any], text: str) -> Any:
    """The value of a flag's text, within its bounds."""
    kind, bounds = _type(field), field.metadata["bounds"]
    wanted = {int: "a whole number", float: "a number", str: "a text"}[kind] + (f" {bounds.words}" if bounds else "")
    if kind is str and bounds is not None:
        wanted = bounds.words
    if text == "" and field.name != "resume":
        raise UserError(f"{flag(field.name)} must be {wanted}, not empty")
    try:
        value = kind(text)
    except ValueError:
        raise UserError(f"{flag(field.name)} must be {wanted}, not {text!r}") from None
    if bounds is not None and not bounds.accepts(value):
        raise UserError(f"{flag(field.name)} must be {wanted}, not {text!r}")
    return value


def parse(arguments: Sequence[str] | None = None) -> Config:
    """The configuration of a command line (``sys.argv`` by default).

    Raises:
        UserError: an unknown flag, a value out of bounds, or flags that exclude each other.
    """
    parser = _Parser(
        prog="python -m dualtrain.main",
        description="Trains a model on one process or many, over torch.distributed or Horovod.",
        epilog="Start it alone, or with torchrun, horovodrun or mpirun. The default trains the embedded digits.",
        allow_abbrev=False,
    )
    for field in _FIELDS.values():
        resume: dict[str, Any] = {"nargs": "?", "const": ""} if field.name == "resume" else {}
        parser.add_argument(
            flag(field.name), dest=field.name, default=None, metavar=_metavar(field), help=_help(field), **resume
        )
    given = {name: text for name, text in vars(parser.parse_args(arguments)).items() if text is not None}
    flags = {name: _convert(_FIELDS[name], text) for name, text in given.items()}
    if "batch_size" in flags and "global_batch_size" in flags:
        raise UserError("--batch-size (of each rank) and --global-batch-size (of all) exclude each other: give one")
    values = load_recipe(flags.get("recipe", _FIELDS["recipe"].default))
    if "batch_size" in flags or "global_batch_size" in flags:
        values = {name: value for name, value in values.items() if name not in ("batch_size", "global_batch_size")}
    config = Config(**{**values, **flags})
    if config.resume == "" and config.run_dir is None:
        raise UserError("--resume needs the run to go on with: add --run-dir, or give --resume a checkpoint's file")
    return config


def _metavar(field: dataclasses.Field[Any]) -> str:
    return {int: "N", float: "X", str: "NAME"}[_type(field)]


def _help(field: dataclasses.Field[Any]) -> str:
    default = "" if field.default is None else f" (default: {field.default}, unless the recipe says otherwise)"
    return str(field.metadata["help"]) + default
