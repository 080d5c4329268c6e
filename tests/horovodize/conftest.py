"""Fixtures for the tests of ``--check`` and ``--fix``."""

from __future__ import annotations

import pytest

from dualtrain.horovodize import check
from dualtrain.horovodize.rules import RULES
from dualtrain.horovodize.rules.undefined import undefined_names


@pytest.fixture(autouse=True)
def no_rule_on_undefined_names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the rule on undefined names, unless the test requests ``all_rules``.

    The other tests' snippets do not define all names that they use.
    """
    if "all_rules" not in request.fixturenames:
        monkeypatch.setattr(check, "RULES", [rule for rule in RULES if rule is not undefined_names])


@pytest.fixture
def all_rules() -> None:
    """Keep the rule on undefined names in a test that requests this fixture."""
