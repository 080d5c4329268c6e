"""Values of ``--optimizer-options``: which texts mean the same as with PyYAML, and which are refused."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from dualtrain.config import parse
from dualtrain.config.values import option_value
from dualtrain.errors import UserError
from dualtrain.training.optimizers import make_optimizer, optimizer_names
from tests.models_for_tests import dropout_net

SAME = [
    *("true", "True", "TRUE", "false", "False", "FALSE", "yes", "Yes", "YES", "no", "No", "NO", "on", "On", "off", "OFF"),
    *("null", "Null", "NULL", "~", "", " true", "0", "1", "-1", "+5", "1_000", "0x10", "-0x10", "0b101"),
    *("0.9", ".5", "5.", "-0.5", "1e-8", "1E5", "1.5e-3", "1e+3", "1_0.5", "6.02e23", "inf", "-inf", "nan", "Infinity"),
    *(".inf", ".Inf", "-.INF", "+.inf", ".nan", ".NaN", "0:0", "0.9:0.999", "1e-6:50", "0.5:1.2", "0.9:0.95:0.999"),
    *("original", "match_rms_adamw", '"original"', "'original'", '"0.5"', "'0.5'", "a b", "x=y", "5x"),
]
#: Text: (value when PyYAML read it, value now).
DIFFERENT = {
    "1:30": (90, (1.0, 30.0)),  # sexagesimal
    "010": (8, 10.0),  # octal
    "007": (7, 7.0),
    "0o10": ("0o10", 8),
    "None": ("None", None),
    "yEs": ("yEs", True),
    "5 # five": (5, "5 # five"),
    "a: b": ({"a": "b"}, "a: b"),
    "-": ([None], "-"),
    "!!int '5'": (5, "!!int '5'"),
}


def with_yaml(text):
    """Return the value that a text had when ``--optimizer-options`` used PyYAML. Skip the test if PyYAML is missing."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install PyYAML")
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:
            return tuple(float(part) for part in text.split(":")) if ":" in text else float(text)
        except ValueError:
            return value
    return value


def assert_alike(one, other):
    assert type(one) is type(other)
    assert one == other or (math.isnan(one) and math.isnan(other))


@pytest.mark.parametrize("text", SAME)
def test_most_option_values_are_read_as_yaml_reads_them(text):
    assert_alike(option_value(text), with_yaml(text))


@pytest.mark.parametrize("text", DIFFERENT)
def test_some_option_values_are_read_differently_from_yaml(text):
    before, now = DIFFERENT[text]
    assert_alike(with_yaml(text), before)
    assert_alike(option_value(text), now)


@pytest.mark.parametrize(
    ("text", "value"),
    [("'", "'"), ("[", "["), ("{", "{"), ("@x", "@x"), ("[1", "[1"), ("[" * 10**5, "[" * 10**5)],
)
def test_option_values_need_not_be_valid_yaml(text, value):
    assert option_value(text) == value


def test_the_default_of_every_optimizer_option_can_be_written_as_text():
    seen = 0
    for kind in optimizer_names().values():
        for parameter in list(inspect.signature(kind).parameters.values())[2:]:
            default = parameter.default
            if isinstance(default, tuple) and None in default:
                continue  # Adafactor's eps cannot be written as text
            text = ":".join(map(str, default)) if isinstance(default, tuple) else str(default)
            assert option_value(text) == default, f"{kind.__name__}.{parameter.name}"
            seen += 1
    assert seen > 50


@pytest.mark.parametrize("options", ["nesterov=flase", "nesterov=[", "dampening=much", "momentum='0.5'"])
def test_text_in_place_of_a_number_or_a_bool_is_refused(options):
    with pytest.raises(UserError, match="is not a valid value; give a number, true or false") as refusal:
        make_optimizer(parse(["--optimizer-options", options]).step, dropout_net((1, 8, 8), 10), 0.1)
    assert "\n" not in str(refusal.value)


def test_text_in_place_of_a_tuple_is_refused():
    with pytest.raises(UserError, match=r"'\(0\.9' is not a valid value; give numbers joined by colons, as in 0\.9:0\.999"):
        make_optimizer(
            parse(["--optimizer", "adam", "--optimizer-options", "betas=(0.9,0.99)"]).step, torch.nn.Linear(2, 2), 0.1
        )


def test_optimizer_options_are_read_as_tuples_bools_and_none():
    options = ["--optimizer", "adamw", "--optimizer-options", "betas=0.5:0.75,amsgrad=yes,foreach=no,fused=None"]
    (group,) = make_optimizer(parse(options).step, dropout_net((1, 8, 8), 10), 0.1).param_groups
    assert (group["betas"], group["amsgrad"], group["foreach"], group["fused"]) == ((0.5, 0.75), True, False, None)


@pytest.mark.parametrize("option", ["capturable=true", "differentiable=true", "betas=[0.9]", f"eps={10**24}"])
def test_options_that_make_every_step_fail_are_refused_before_training(option):
    step = parse(["--optimizer", "adam", "--optimizer-options", option]).step
    with pytest.raises(UserError, match="--optimizer adam refuses its options"):
        make_optimizer(step, torch.nn.Linear(2, 2), 0.1)


def test_an_optimizer_that_refuses_the_models_parameters_is_named():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("needs torch.optim.Muon (torch 2.9 or newer)")
    with pytest.raises(UserError, match=r"muon refuses .* the model's parameters \(.*2D.*or choose another optimizer$"):
        make_optimizer(parse(["--optimizer", "muon"]).step, torch.nn.Linear(2, 2), 0.1)
