"""Report of finished and unfinished runs: one page with results, settings and charts."""
