"""The console: one page that shows operators the running batch.

`page` serves the page's files, which contain no data. `endpoints` serves the data, for operators only: the live view of
steps as server-sent events, and the page's calls. `feed` converts parts of the live view to JSON.
"""
