"""Batch runs: many requests from a file, each answered exactly once in another file, over any number of interruptions.

`jobs` parses requests and formats results. `journal` is the results file, which also shows which requests are done.
`runner` sends the remaining requests.
"""
