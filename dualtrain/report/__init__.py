"""Report of runs, finished or not: one page with results, settings and charts."""
