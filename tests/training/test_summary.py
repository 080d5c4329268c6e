"""The lines that a run prints first: its settings, and a table of the model's layers where torchinfo is installed."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from dualtrain.config import parse
from dualtrain.training.records import opening

MODEL = nn.Sequential(nn.Linear(3, 2))


def test_the_layers_are_listed_with_torchinfo():
    pytest.importorskip("torchinfo", reason="needs torchinfo: pip install torchinfo")
    text = opening(parse(["--lr", "0.25"]).plain(), MODEL)
    assert "lr=0.25" in text
    assert "Linear" in text


def test_without_torchinfo_there_is_no_table_and_no_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchinfo", None)
    text = opening(parse(["--lr", "0.25"]).plain(), MODEL)
    assert "lr=0.25" in text
    assert "Linear" not in text
    assert "torchinfo" not in text
    assert text == text.strip()
