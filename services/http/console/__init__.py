"""The console: one page that shows operators the running batch.

`page` serves the files of the page, which hold no data. `endpoints` serves the data, to operators only: the live view
of the steps as server-sent events, and the calls of the page. `feed` turns parts of the live view into
JSON.
"""
