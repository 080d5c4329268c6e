"""The end of the story: run folders, finished or not, become one page with results, settings and charts."""
