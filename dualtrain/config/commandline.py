"""The command line that is made from the table of settings, and what is wrong with what was typed.

A value comes from the flag, else from the recipe, else from the table's default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from dualtrain.config.recipes import load_recipe, recipe_list
from dualtrain.config.sections import Config
from dualtrain.console import Parser, show
from dualtrain.errors import UserError

LARGEST = 2**32 - 1  # of whole numbers: products of a few of them stay within 64 bits
FIELDS = {field.name: field for field in dataclasses.fields(Config)}


class _Parser(Parser):
    """The parser of a run, which knows the flag that was meant."""

    def error(self, message: str) -> NoReturn:
        for word in message.split():
            near = difflib.get_close_matches(word, [flag(name) for name in FIELDS], n=1)
            if message.startswith("unrecognized") and word.startswith("--") and near:
                message += f" (did you mean {near[0]}?)"
                break
        super().error(message)


def flag(name: str) -> str:
    """``run_dir`` → ``--run-dir``."""
    return "--" + name.replace("_", "-")


def parse(arguments: Sequence[str] | None = None) -> Config:
    """The configuration of a command line (``sys.argv`` by default).

    ``--help`` and ``--recipe list`` print and raise SystemExit.

    Raises:
        UserError: an unknown flag, a value out of bounds, or flags that exclude each other.
    """
    given = {name: text for name, text in vars(_parser().parse_args(arguments)).items() if text is not None}
    flags = {name: value if isinstance(value, bool) else _convert(FIELDS[name], value) for name, value in given.items()}
    recipe = str(flags.get("recipe", FIELDS["recipe"].default))
    if recipe == "list":
        show(recipe_list())
        raise SystemExit(0)
    config = Config(**{**_left_of(load_recipe(recipe), flags), **flags})
    _check(config, flags)
    return config


def _left_of(recipe: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """What of a recipe still makes sense beside the flags."""
    gone: set[str] = set()
    if "batch_size" in flags or "global_batch_size" in flags:
        gone |= {"batch_size", "global_batch_size"}
    if flags.get("optimizer", recipe.get("optimizer")) != recipe.get("optimizer"):
        gone |= {"momentum", "weight_decay", "optimizer_options"}  # of the recipe's own optimizer
    return {name: value for name, value in recipe.items() if name not in gone}


def _check(config: Config, flags: dict[str, Any]) -> None:
    """Refuses flags that do not go together."""
    if "batch_size" in flags and "global_batch_size" in flags:
        raise UserError("--batch-size (of each rank) and --global-batch-size (of all) exclude each other: give one")
    if config.batch_size is None and config.global_batch_size is None:
        raise UserError(f"--recipe {config.recipe} sets no batch size: give --batch-size or --global-batch-size")
    if config.resume == "" and config.run_dir is None:
        raise UserError("--resume needs the run to go on with: add --run-dir, or give --resume a checkpoint's file")
    for name in ("parallel_loss", "output_device"):
        if getattr(config, name) not in (None, False) and not config.data_parallel:
            raise UserError(f"{flag(name)} is a part of --data-parallel: give both, or neither")
    if config.data_parallel and config.backend not in ("auto", "local"):
        raise UserError(f"--data-parallel is one process without ranks: use --backend local, not {config.backend}")
    if config.data_parallel and config.nproc is not None:
        raise UserError("--data-parallel is one process on all GPUs and --nproc starts several: give one of them")
    if config.data_parallel and config.compile:
        raise UserError(
            "--data-parallel copies the model to each GPU at every step, which --compile cannot follow: give one"
        )
    if config.nproc is not None and config.backend == "local":
        raise UserError(
            "--nproc starts ranks that must meet, and --backend local is one process alone: use torch or horovod"
        )
    if config.lr_scale != "none" and config.lr_batch is None and config.batch_size is None:
        raise UserError(
            f"--lr-scale {config.lr_scale} must know which batch --lr was chosen for: give --lr-batch, or --batch-size"
        )
    if config.schedule == "step" and config.lr_step is None:
        raise UserError("--schedule step needs the steps between its drops: give --lr-step")
    if config.schedule == "multistep" and config.lr_milestones is None:
        raise UserError("--schedule multistep needs the steps of its drops: give --lr-milestones, as in 1000,2000")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m dualtrain.main",
        description="Trains a model on one process or many, over torch.distributed or Horovod.",
        epilog="Start it alone, or with torchrun, horovodrun, mpirun or srun. The default trains the embedded digits.",
    )
    groups: dict[str, Any] = {}
    for field in FIELDS.values():
        heading = field.metadata["group"]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        kind: dict[str, Any] = {"metavar": _metavar(field)}
        if field.name == "resume":
            kind |= {"nargs": "?", "const": ""}
        elif _type(field) is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        groups[heading].add_argument(flag(field.name), dest=field.name, default=None, help=_help(field), **kind)
    return parser


def _type(field: dataclasses.Field[Any]) -> type:
    return {"int": int, "float": float, "bool": bool}.get(str(field.type).removesuffix(" | None"), str)


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
    if kind is int and not -LARGEST <= value <= LARGEST:
        raise UserError(f"{flag(field.name)} must be {wanted}, up to {LARGEST}, not {text[:80]!r}")
    if bounds is not None and not bounds.accepts(value):
        raise UserError(f"{flag(field.name)} must be {wanted}, not {text!r}")
    return value


def _metavar(field: dataclasses.Field[Any]) -> str:
    return {int: "N", float: "X", str: "NAME"}.get(_type(field), "")


def _help(field: dataclasses.Field[Any]) -> str:
    default = "" if field.default is None else f" (default: {field.default}, unless the recipe says otherwise)"
    return (str(field.metadata["help"]) + default).replace("%", "%%")
