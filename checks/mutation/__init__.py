"""Mutation testing of the scheduler core: whether a check detects a change in each line.

`mutators` finds every place in `scheduler_svc/core` for a small change (a boundary, a sign, a negation, a removed
statement) and generates the changed source. `hunt` runs one such *mutant* in a separate process, where an import hook
replaces the real module; no file is changed. `hunt` then looks for a failing check. Short simulations run first,
because they are cheap and kill most mutants. The core's tests follow, then more simulations.

`__main__` samples mutants by a seed and runs them one after the other. It stores each result in a file, from which it
continues when it is started again.

A mutant that survives either breaks no promise (an equivalent, a tuning constant) or shows a gap in the tests.
docs/decisions classifies the survivors.
"""
