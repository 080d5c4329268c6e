"""Common parts of the bench's charts: a logarithmic axis, and the SVG file of a chart."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dualtrain.report.document import asset


@dataclass(frozen=True)
class LogAxis:
    """Logarithmic axis: the values from ``low`` to ``high`` are at the pixels from ``begin`` to ``end``."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of ``value``."""
        fraction = math.log(value / self.low) / math.log(self.high / self.low)
        return self.begin + fraction * (self.end - self.begin)


def svg_file(element: str) -> str:
    """Return the content of an SVG file: ``element``, whose first line is the start tag, with a style sheet."""
    head, _, rest = element.partition("\n")
    return f"{head}\n<style>\n{asset('page.css')}</style>\n{rest}\n"
