"""Fixtures for the tests of ``--check`` and ``--fix``."""

from __future__ import annotations

import pytest

from dualtrain.horovodize import check
from dualtrain.horovodize.rules import RULES
from dualtrain.horovodize.rules.undefined import undefined_names


@pytest.fixture(autouse=True)
def snippets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the rule on undefined names, since snippets use names without a definition (see ``all_rules``)."""
    if "all_rules" not in request.fixturenames:
        monkeypatch.setattr(check, "RULES", [rule for rule in RULES if rule is not undefined_names])


@pytest.fixture
def all_rules() -> None:
    """Keep all rules in a test that requests this fixture."""
