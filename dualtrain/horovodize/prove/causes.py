"""Lines of the script that may explain a difference: findings of ``--check`` that can change numbers."""

from __future__ import annotations

from pathlib import Path

from dualtrain.files import read_text
from dualtrain.horovodize.rules import Rule, ranks, single_calls, steps, wrapping
from dualtrain.horovodize.source import Source, wrapped_names

#: Rules whose findings can change numbers, the likeliest cause first.
CAUSES: tuple[Rule, ...] = (
    steps.clip_before_synchronize,
    steps.scaler_before_synchronize,
    steps.second_reduction,
    steps.zero_grad_before_step,
    single_calls.unnamed_calls,
    ranks.collective_on_some_ranks,
    single_calls.half_precision,
    single_calls.adasum,
    single_calls.join_with_other_operations,
    wrapping.never_broadcast,
    wrapping.frozen_after_wrapping,
    wrapping.group_after_wrapping,
    wrapping.checkpoint_before_wrapping,
    wrapping.optimizer_state,
)


def likely_causes(script: Path) -> list[str]:
    """Return the lines of ``script`` that may give different numbers on the two libraries, the likeliest first.

    Return an empty list if the script cannot be read as Python, because the comparison does not need the lines.
    """
    try:
        text = read_text(script, "utf-8-sig")
        source = Source(text, wrapped_names([Source(text)]))
    except (OSError, ValueError, SyntaxError):
        return []
    found = [finding for rule in CAUSES for finding in sorted(rule(source), key=lambda found: found.line)]
    return [f"{script}:{finding.line}: {finding.message}" for finding in found]
