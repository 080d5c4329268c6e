"""The lines that a run prints first: settings, model, settings without effect; with --verbose all settings and layers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from dualtrain.backends import connect
from dualtrain.config import RunFacts, parse, recipe_names, run_name, without_effect
from dualtrain.main import main
from dualtrain.training.opening import job_in_words, model_line, settings_line, verbose_lines

MODEL = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2)))


def test_the_settings_line_shows_only_settings_that_differ_from_the_recipe():
    flags = ["--lr", "0.25", "--batch-size", "8", "--no-drop-last", "--run-dir", "x", "--threads", "3"]
    assert settings_line(parse(flags).plain(), Path("x")) == (
        "settings: recipe digits-convnet with --batch-size 8 --lr 0.25; all are in x/config.json"
    )
    assert settings_line(parse([]).plain(), Path("x")) == "settings: recipe digits-convnet; all are in x/config.json"


def test_one_process_without_a_launcher_names_neither_transport_nor_launcher():
    with connect("local") as backend:
        assert job_in_words(backend, None, 1) == "1 × cpu, 1 thread, local backend, without a launcher"
        assert job_in_words(backend, 4, 2) == "1 × cpu as 4 virtual ranks, 2 threads, local backend, without a launcher"


def test_the_model_line_has_the_numbers_of_parameters_and_layers():
    MODEL[0].requires_grad_(False)
    assert model_line("mine:build", MODEL) == "model: mine:build, 12 parameters, 4 of them trainable, in 2 layers"


@pytest.mark.parametrize("installed", [True, False])
def test_verbose_shows_all_settings_and_with_torchinfo_the_layers(monkeypatch, installed):
    if installed:
        pytest.importorskip("torchinfo", reason="needs torchinfo: pip install torchinfo")
    else:
        monkeypatch.setitem(sys.modules, "torchinfo", None)
    text = verbose_lines(parse(["--lr", "0.25"]).plain(), MODEL)
    assert "lr=0.25" in text
    assert "warmup_steps=0" in text
    assert ("Linear" in text) == installed
    assert "torchinfo" not in text
    assert text == text.strip()


@pytest.mark.parametrize(
    ("dataset", "model", "name"),
    [
        ("digits", "convnet", "digits-convnet"),
        ("digits", "resnet18", "digits-resnet18"),
        ("digits", "my.resnets:build", "digits-resnets"),
        ("digits", "resnets:small", "digits-resnets-small"),
        ("samples:tiny", "convnet", "samples-tiny-convnet"),
        ("mine:data", "mine:model", "mine"),
        ("file:data", "file:net", "file"),
        ("file:tiny", "file:net", "file-tiny"),
        ("file:tiny", "file:deep", "file-tiny-deep"),
        ("data:build", "model:build", "own"),
    ],
)
def test_a_run_is_named_after_what_it_trains(dataset, model, name):
    assert run_name("digits-convnet", dataset, model) == name


#: Facts of a run in which most settings have an effect.
FACTS = RunFacts(
    steps=100,
    steps_of_epochs=100,
    global_batch=64,
    part=32,
    short_batch=True,
    shape=(1, 8, 8),
    classes=10,
    ranks=2,
    cores=4096,
    resumed=False,
    norms=True,
    workers=True,
    folder=True,
)


def notes(*flags: str, **facts) -> list[str]:
    settings = parse(flags).plain()
    return without_effect(settings, replace(FACTS, **{"classes": settings["classes"] or 10, **facts}))


@pytest.mark.parametrize("recipe", recipe_names())
def test_all_settings_of_a_recipe_have_an_effect(recipe):
    assert notes("--recipe", recipe, steps=5000, steps_of_epochs=5000) == []


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--recipe cifar10-resnet50-frozen --image-size 32",
            "--image-size 32 has no effect: --augment weights uses the transforms",
        ),
        ("--pad 2", "--pad 2 has no effect: only --augment crop-flip"),
        (
            "--recipe synthetic --augment crop-flip",
            "--augment crop-flip has no effect: image transforms are not applied to",
        ),
        ("--samples 9", "--samples 9 has no effect: it is for --dataset synthetic"),
        ("--download", "--download has no effect: --dataset digits is not downloaded"),
        ("--workers 4", "--workers 4 has no effect: --dataset digits is in memory"),
        ("--lr-min 0.01", "--lr-min 0.01 has no effect: it is for --schedule cosine"),
        ("--pretrained --weights x --model resnet18", "--pretrained has no effect: --weights replaces all weights"),
        ("--lr-batch 32", "--lr-batch 32 has no effect: --lr-scale none"),
        ("--warmup-steps 2000", "--warmup-steps 2000 does not end within the run, which ends after step 100"),
        ("--max-steps 200", "--max-steps 200 has no effect: the run ends after step 100, with --epochs 12"),
        ("--schedule multistep --lr-milestones 500,900", "--lr-milestones 500,900 has no effect: the run ends"),
        (
            "--schedule multistep --lr-milestones 50,900",
            "--lr-milestones 50,900: the run ends after step 100, so that the learning rate is not changed at 900",
        ),
        ("--epochs 1 --checkpoint-epochs 2", "--checkpoint-epochs 2 has no effect: the run ends in its first epoch"),
        ("--log-every 101", "--log-every 101 has no effect: the run ends after step 100"),
        ("--schedule step --lr-step 100", "--lr-step 100 has no effect: the run ends after step 100"),
        ("--early-stop 12", "--early-stop 12 has no effect: the run has 12 epochs"),
        ("--early-stop 11", "--early-stop 11 has no effect: the run has 12 epochs"),
        ("--schedule cosine --lr-step 500", "--lr-step 500 has no effect: it is for --schedule step"),
    ],
)
def test_a_setting_without_effect_is_noted_in_one_line(flags, line):
    (found,) = notes(*flags.split())
    assert found.startswith(line)


def test_early_stop_has_no_effect_if_max_steps_ends_the_run_earlier():
    assert notes("--early-stop", "2", steps=20) == ["--early-stop 2 has no effect: the run has 3 epochs"]
    assert notes("--early-stop", "1", steps=20) == []


def test_early_stop_may_have_an_effect_in_a_resumed_run_which_may_have_more_evaluations_than_epochs():
    assert notes("--early-stop", "2", steps=20, resumed=True) == []


def test_checkpoint_epochs_has_no_effect_only_if_the_run_ends_in_its_first_epoch():
    for number in ("2", "12", "13"):
        assert notes("--checkpoint-epochs", number) == []
    line = "--checkpoint-epochs 12 has no effect: the run ends in its first epoch"
    assert notes("--checkpoint-epochs", "12", steps=8, steps_of_epochs=100) == [line]


@pytest.mark.parametrize(
    ("flags", "facts", "line"),
    [
        ("--weights x", {"resumed": True}, "--weights x has no effect: the run resumes with the weights of a checkpoint"),
        (
            "--sync-batchnorm",
            {"norms": False},
            "--sync-batchnorm has no effect: the model has no BatchNorm that is trained",
        ),
        ("--sync-batchnorm", {"ranks": 1}, "--sync-batchnorm has no effect: the run has one rank"),
        ("--transport native", {"ranks": 1}, "--transport native has no effect: the run has one rank"),
        ("--drop-last", {"short_batch": False}, "--drop-last has no effect: all batches have 64 samples"),
        (
            "--channels-last",
            {"shape": (8,)},
            "--channels-last has no effect: it is for images, and a sample has the shape (8,)",
        ),
        (
            "--dataset mine:data --classes 5",
            {"classes": 3},
            "--classes 5 has no effect: mine:data returns data of 3 classes",
        ),
        (
            "--dataset mine:data --workers 4",
            {"workers": False},
            "--workers 4 has no effect: mine:data returns data that worker processes do not read",
        ),
        ("--dataset mine:data --data-dir x", {"folder": False}, "--data-dir x has no effect: mine:data takes no argument"),
        ("--workers 4", {"workers": False}, "--workers 4 has no effect: --dataset digits is in memory, and needs no proc"),
        (
            "--accumulate 33",
            {},
            "--accumulate 33 is more than the 32 samples that a rank has in a step: each backward pass has one sample",
        ),
        (
            "--dataset mine:data --workers 8",
            {"cores": 1},
            "--workers 8 is more than the 1 core that each rank may use: fewer workers are probably as fast",
        ),
    ],
)
def test_a_setting_that_does_not_fit_the_facts_of_the_run_is_noted_in_one_line(flags, facts, line):
    (found,) = notes(*flags.split(), **facts)
    assert found.startswith(line)


def test_settings_with_an_effect_are_not_noted():
    flags = "--dataset mine:data --data-dir x --classes 5 --workers 8 --transport native --drop-last --accumulate 32"
    assert notes(*flags.split(), "--weights", "x", "--sync-batchnorm", "--channels-last", cores=8) == []
    assert notes("--dataset", "mine:data", cores=1) == []
    # With --pretrained, googlenet also converts its inputs, even if --weights replaces all weights.
    assert notes("--pretrained", "--weights", "x", "--model", "googlenet") == []


def test_a_run_on_the_users_data_notes_settings_without_effect(tmp_path, monkeypatch, capsys):
    (tmp_path / "unused.py").write_text(
        "import torch\n"
        "from dualtrain.data import Task\n"
        "from dualtrain.data.memory import TensorSource\n"
        "def data():\n"
        "    source = TensorSource(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64))\n"
        "    return Task(source, source, (3,), classes=2)\n"
        "def model(shape, classes):\n"
        "    return torch.nn.Linear(3, classes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = "--dataset unused:data --model unused:model --data-dir . --workers 1 --classes 7 --transport native --epochs 1"
    assert main([*flags.split(), "--batch-size", "4", "--drop-last", "--run-dir", str(tmp_path / "run")]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert found == [
        "note: --transport native has no effect: the run has one rank",
        "note: --drop-last has no effect: all batches have 4 samples",
        "note: --classes 7 has no effect: unused:data returns data of 2 classes",
        "note: --workers 1 has no effect: unused:data returns data that worker processes do not read",
        "note: --data-dir . has no effect: unused:data takes no argument",
    ]
