"""Parse the command line, and check its values.

A value comes from the flag, else from the recipe, else from the setting's default. A flag for the batch size, or for
another optimizer, also drops related values of the recipe: see ``_without_overridden``.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from dualtrain.config.fields import Setting
from dualtrain.config.recipes import load_recipe, recipe_list
from dualtrain.config.sections import AUTO, SECTIONS, SETTINGS, Config, ModelSection, RunSection
from dualtrain.config.values import split_options
from dualtrain.console import Parser, program, show
from dualtrain.errors import UserError

LARGEST = 2**32 - 1  # largest integer that a flag accepts, for example as a seed


class _Parser(Parser):
    """A parser that suggests the flag that was probably meant."""

    def error(self, message: str) -> NoReturn:
        for word in message.split():
            near = difflib.get_close_matches(word, [setting.flag for setting in SETTINGS.values()], n=1)
            if message.startswith("unrecognized") and word.startswith("--") and near:
                message += f" (did you mean {near[0]}?)"
                break
        super().error(message)


def parse(arguments: Sequence[str] | None = None) -> Config:
    """Make the configuration of a command line (``sys.argv`` by default).

    ``--help`` and ``--recipe list`` print and raise SystemExit.

    Raises:
        UserError: a flag or a recipe is unknown, a value is not accepted, flags exclude each other, or a flag needs another
            one, which is missing.
    """
    given = {name: text for name, text in vars(_parser().parse_args(arguments)).items() if text is not None}
    flags = {name: value if isinstance(value, bool) else _convert(SETTINGS[name], value) for name, value in given.items()}
    recipe = str(flags.get("recipe", SETTINGS["recipe"].default))
    if recipe == "list":
        show(recipe_list())
        raise SystemExit(0)
    config = Config.of({**_without_overridden(load_recipe(recipe), flags), **flags})
    _check_exclusive(flags)
    _check_run(config.run, config.model)
    _check_restarts(config.run)
    _check_step(config)
    return config


def _check_exclusive(flags: dict[str, Any]) -> None:
    """Raise UserError if two flags of the command line set the same value."""
    if "batch_size" in flags and "global_batch_size" in flags:
        raise UserError("--batch-size (of each rank) and --global-batch-size (of all) exclude each other: give one")
    options = dict(split_options(flags.get("optimizer_options")))
    for name in ("momentum", "weight_decay"):  # a recipe's value is not a contradiction: the option overrides it
        if name in flags and name in options:
            raise UserError(f"{SETTINGS[name].flag} and {name} in --optimizer-options exclude each other: give one")


def _without_overridden(recipe: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Return ``recipe`` without the values that do not apply, because a flag sets a different batch size or optimizer."""
    dropped: set[str] = set()
    if "batch_size" in flags or "global_batch_size" in flags:
        dropped |= {"batch_size", "global_batch_size"}
    if flags.get("optimizer", recipe["optimizer"]).lower() != recipe["optimizer"]:
        dropped |= {"momentum", "weight_decay", "optimizer_options"}  # these belong to the recipe's optimizer
    return {name: value for name, value in recipe.items() if name not in dropped}


def _check_run(run: RunSection, model: ModelSection) -> None:
    """Raise UserError if a flag contradicts --data-parallel or --nproc, or needs --data-parallel, which is missing."""
    for name in ("parallel_loss", "output_device"):
        if getattr(run, name) not in (None, False) and not run.data_parallel:
            raise UserError(f"{SETTINGS[name].flag} is a part of --data-parallel: give both, or neither")
    if run.data_parallel and run.backend not in ("auto", "local"):
        raise UserError(f"--data-parallel is one process without ranks: use --backend local, not {run.backend}")
    if run.data_parallel and run.nproc is not None:
        raise UserError("--data-parallel is one process on all GPUs, and --nproc starts several processes: give one flag")
    if run.data_parallel and model.compile:
        raise UserError(
            "--data-parallel copies the model to each GPU in every step; torch.compile does not support this: give one flag"
        )
    if run.nproc is not None and run.backend == "local":
        raise UserError(
            "--nproc starts ranks that communicate, but --backend local is for one process: use torch or horovod"
        )


def _check_restarts(run: RunSection) -> None:
    """Raise UserError if --max-restarts is given without --nproc."""
    if run.max_restarts and run.nproc is None:
        raise UserError(
            "--max-restarts is for the ranks that --nproc starts: add --nproc, or give --max-restarts to torchrun"
        )


def _check_step(config: Config) -> None:
    """Raise UserError if the batch size, or a setting that another setting needs, is missing."""
    step, schedule, output = config.step, config.schedule, config.output
    if step.batch_size is None and step.global_batch_size is None:
        raise UserError(f"--recipe {config.run.recipe} sets no batch size: give --batch-size or --global-batch-size")
    if output.resume == "" and output.run_dir is None:
        raise UserError("--resume needs a run to resume: add --run-dir, or name a checkpoint file (--resume FILE)")
    if output.resume == AUTO and output.run_dir is None:
        raise UserError("--resume auto needs the folder of the run: add --run-dir (for a file named auto, give ./auto)")
    # With --resume or --resume FILE, lr_batch comes from the checkpoint. With --resume auto, there may be no checkpoint.
    reference = schedule.lr_batch or step.batch_size or output.resume not in (None, AUTO)
    if schedule.lr_scale != "none" and not reference:
        raise UserError(
            f"--lr-scale {schedule.lr_scale} needs the batch size that --lr was chosen for: give --lr-batch or --batch-size"
        )
    if schedule.name == "step" and schedule.lr_step is None:
        raise UserError("--schedule step needs the number of steps between drops: give --lr-step")
    if schedule.name == "multistep" and schedule.lr_milestones is None:
        raise UserError("--schedule multistep needs the steps of its drops: give --lr-milestones, as in 1000,2000")


def _parser() -> _Parser:
    parser = _Parser(
        prog=program("dualtrain.main"),
        description="Trains a model on one process or many, over torch.distributed or Horovod.",
        epilog="Start it without a launcher, or with torchrun, horovodrun, mpirun or srun. By default it trains on the "
        "handwritten digits that are part of the package.",
    )
    groups = {section: parser.add_argument_group(heading) for section, (_, heading) in SECTIONS.items()}
    for setting in SETTINGS.values():
        form: dict[str, Any] = {"metavar": {int: "N", float: "X", str: "NAME"}.get(setting.kind, "")}
        if setting.name == "resume":
            form |= {"nargs": "?", "const": ""}
        elif setting.kind is bool:
            form = {"action": argparse.BooleanOptionalAction}
        groups[setting.section].add_argument(setting.flag, dest=setting.name, default=None, help=_help(setting), **form)
    return parser


def _convert(setting: Setting, text: str) -> Any:
    """Convert a flag's text to its value. Raises UserError if the setting does not accept the text."""
    bounds = setting.bounds
    expected = {int: "a whole number", float: "a number", str: "text"}[setting.kind]
    expected += f" {bounds.words}" if bounds else ""
    if setting.kind is str and bounds is not None:
        expected = bounds.words
    if text == "" and setting.name != "resume":
        raise UserError(f"{setting.flag} must be {expected}, not empty")
    refusal = UserError(f"{setting.flag} must be {expected}, not {text[:80]!r}")
    try:
        value = setting.kind(text)
    except ValueError:
        raise refusal from None
    if setting.kind is not str and not text.isascii():  # int() and float() also accept non-ASCII digits
        raise refusal
    if bounds is not None and not bounds.accepts(value):
        raise refusal
    if setting.kind is int and not -LARGEST <= value <= LARGEST:
        raise UserError(f"{setting.flag} must be {expected}, up to {LARGEST}, not {text[:80]!r}")
    return value


def _help(setting: Setting) -> str:
    unless = "" if setting.name == "recipe" else ", unless the recipe says otherwise"
    default = "" if setting.default is None else f" (default: {setting.default}{unless})"
    return (setting.help + default).replace("%", "%%")
