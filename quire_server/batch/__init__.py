"""Batch runs: many requests from a file, each answered exactly once in another file, over any number of interruptions.

`jobs` parses requests and formats answers, `journal` is the file of answers, which shows which requests are done, and
`runner` sends the remaining requests.
"""
