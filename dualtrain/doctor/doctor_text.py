"""The report as lines of text, for people."""

from __future__ import annotations
