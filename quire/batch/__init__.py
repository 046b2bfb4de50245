"""Many requests from a file, their answers into another, each exactly once, however often the run is interrupted.

`jobs` reads lines and makes answers, `journal` is the file of answers and knows what is done, `runner` sends what is
left.
"""
