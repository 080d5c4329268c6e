"""The command line: every flag, its bounds, and one clear line for each error."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualtrain.config import SETTINGS, Config, load_recipe, parse, recipe_names
from dualtrain.errors import UserError


def test_the_defaults_come_from_the_default_recipe():
    config = parse([])
    assert config.run.recipe == "digits-convnet"
    for name, value in load_recipe("digits-convnet").items():
        assert config.plain()[name] == value


def test_a_flag_overrides_the_recipe():
    assert parse(["--lr", "0.25"]).schedule.lr == 0.25
    assert parse(["--lr=0.25"]).schedule.lr == 0.25


def test_a_configuration_is_nested_by_subject_and_flat_in_files():
    config = parse(["--model", "mnist-net", "--schedule", "cosine", "--run-dir", "runs/one", "--lr", "0.5"])
    assert (config.model.name, config.schedule.name, config.schedule.lr) == ("mnist-net", "cosine", 0.5)
    plain = config.plain()
    assert [plain[name] for name in ("model", "schedule", "lr", "run_dir")] == ["mnist-net", "cosine", 0.5, "runs/one"]
    assert Config.of(plain) == config


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_contains_only_known_settings(name):
    assert set(load_recipe(name)) <= SETTINGS.keys()
    assert parse(["--recipe", name]).run.recipe == name


def test_a_flag_turns_off_a_switch_that_the_recipe_turns_on():
    assert parse(["--recipe", "mnist-resnet18"]).run.deterministic
    assert not parse(["--recipe", "mnist-resnet18", "--no-deterministic"]).run.deterministic


def test_another_optimizer_does_not_get_the_recipes_momentum():
    assert parse([]).step.momentum == 0.9
    assert parse(["--optimizer", "adam"]).step.momentum == 0
    assert parse(["--optimizer", "rmsprop", "--momentum", "0.5"]).step.momentum == 0.5
    assert parse(["--optimizer", "SGD"]).step.momentum == parse([]).step.momentum == 0.9  # the same optimizer


def test_the_recipes_are_listed(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--recipe", "list"])
    assert not end.value.code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()


def test_batch_size_is_per_rank_and_replaces_the_recipes_global_batch_size():
    config = parse(["--batch-size", "8"])
    assert [config.step.global_batch(size) for size in (1, 3)] == [8, 24]
    assert [parse(["--global-batch-size", "30"]).step.global_batch(size) for size in (1, 3)] == [30, 30]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--backend", "mpi"], ["--backend", "'mpi'", "auto, torch, horovod, local"]),
        (["--lr", "-1"], ["--lr", "above 0", "'-1'"]),
        (["--lr", "nan"], ["--lr", "above 0", "'nan'"]),
        (["--lr", "inf"], ["--lr", "above 0", "'inf'"]),
        (["--lr", "fast"], ["--lr", "number", "'fast'"]),
        (["--epochs", "0"], ["--epochs", "whole number", "1 or more", "'0'"]),
        (["--epochs", "1.5"], ["--epochs", "whole number", "'1.5'"]),
        (["--epochs", "9" * 400], ["--epochs must be a whole number 1 or more, up to 4294967295"]),  # too large for a float
        (["--max-steps", "0"], ["--max-steps", "1 or more"]),
        (["--batch-size", "0"], ["--batch-size", "1 or more"]),
        (["--global-batch-size", "x"], ["--global-batch-size", "whole number"]),
        (["--batch-size", "4", "--global-batch-size", "8"], ["--batch-size", "--global-batch-size", "one"]),
        (["--amp", "fp8"], ["--amp", "off, bf16, fp16"]),
        (["--schedule", "step"], ["--schedule step", "--lr-step"]),
        (["--schedule", "multistep"], ["--lr-milestones"]),
        (["--lr-scale", "linear"], ["--lr-scale linear", "--lr-batch"]),
        (["--parallel-loss"], ["--parallel-loss", "--data-parallel"]),
        (["--data-parallel", "--backend", "torch"], ["--data-parallel", "--backend local"]),
        (["--data-parallel", "--nproc", "2"], ["--data-parallel", "--nproc"]),
        (["--max-restarts", "2", "--run-dir", "x"], ["--max-restarts", "add --nproc, or give --max-restarts to torchrun"]),
        (["--nproc", "0"], ["--nproc", "1 or more"]),
        (["--threads", "0"], ["--threads", "whole number", "from 1 to 1024", "'0'"]),
        (["--threads", "1.5"], ["--threads", "whole number", "'1.5'"]),
        (["--threads", "100000"], ["--threads", "from 1 to 1024"]),
        (["--ema", "1"], ["--ema", "below 1"]),
        (["--clip-norm", "0"], ["--clip-norm", "above 0"]),
        (["--warmup-steps", "-1"], ["--warmup-steps", "0 or more"]),
        (["--best", "loss"], ["--best", "val_loss, val_accuracy"]),
        (["--momentum", "1"], ["--momentum", "below 1"]),
        (["--weight-decay", "-0.1"], ["--weight-decay", "0 or more"]),
        (["--seed", "-1"], ["--seed", "from 0 to"]),
        (["--seed", "99999999999999999999"], ["--seed", "from 0 to"]),
        (["--run-dir", ""], ["--run-dir", "empty"]),
        (["--run-dir", "a\nb"], ["--run-dir must be one line", r"'a\nb'"]),
        (["--log-seconds", "1e300"], ["--log-seconds must be a number from 0 to 1000000000"]),
        (["--workers", "4294967295"], ["--workers must be a whole number from 0 to 1024"]),
        (["--workers", "9999999999"], ["--workers must be a whole number from 0 to 1024, not '9999999999'"]),
        (["--epochs", "٣"], ["--epochs must be a whole number", "'٣'"]),
        (["--lr", "٣"], ["--lr must be a number", "'٣'"]),
        (["--lr-milestones", "²"], ["--lr-milestones must be steps above 0", "'²'"]),
        (["--lr-milestones", "0,5"], ["--lr-milestones must be steps above 0"]),
        (["--lr-milestones", "9" * 5000], ["--lr-milestones must be steps above 0"]),
        (["--checkpoint-every", "0"], ["--checkpoint-every", "1 or more"]),
        (["--checkpoint-seconds", "-1"], ["--checkpoint-seconds", "0 or more"]),
        (["--log-every", "0"], ["--log-every", "1 or more"]),
        (["--timeout", "0"], ["--timeout", "from 0.1 to"]),
        (["--timeout", "1e15"], ["--timeout", "from 0.1 to"]),
        (["--recipe", "nothing"], ["--recipe", "'nothing'", "digits-convnet"]),
        (["--resume"], ["--resume", "--run-dir"]),
        (["--resume", "auto"], ["--resume auto", "add --run-dir", "./auto"]),
        (["--lr"], ["--lr", "expected one argument"]),
        (["--epoch", "3"], ["--epoch", "did you mean --epochs"]),
        (["stray"], ["stray"]),
    ],
)
def test_the_error_for_bad_input_names_the_flag_the_value_and_the_bound(arguments, parts):
    with pytest.raises(UserError) as refusal:
        parse(arguments)
    message = str(refusal.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for one in SETTINGS.values():
        assert one.flag in text
    # A recipe cannot change the default of --recipe, so its help does not say "unless the recipe says otherwise". Compare
    # without white space, because argparse breaks lines at hyphens.
    assert "(default:digits-convnet)--device" in "".join(text.split())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_flag_refuses_two_dashes_as_its_value_and_numbers_that_are_too_large(name):
    flag, kind = SETTINGS[name].flag, SETTINGS[name].kind
    with pytest.raises(UserError, match=f"{flag} must have a value, not '--'"):
        parse([f"{flag}=--"])
    if kind is int:
        for text in (str(2**63), "1" * 5000, str(-(2**63))):
            with pytest.raises(UserError, match=f"{flag} must be a whole number"):
                parse([flag, text])


@pytest.mark.parametrize(
    ("flags", "again"),
    [
        ("", "the same command and --run-dir runs/new --resume"),
        ("--run-dir runs/new", "the same command and --resume"),
        ("--run-dir runs/new --resume old/step-1.safetensors", "the same command and --resume"),
        ("--run-dir runs/new --resume", "the same command"),
        ("--run-dir runs/new --resume auto", "the same command"),
    ],
)
def test_the_command_that_continues_a_run_adds_missing_flags(flags, again):
    assert parse(flags.split()).output.again(Path("runs/new")) == again
