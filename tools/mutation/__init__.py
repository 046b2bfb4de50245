"""Mutation testing of the scheduler core: is every line of it watched by some check?

How it works. `mutators` finds every place in `scheduler_svc/core` that can be changed a little (a boundary, a sign, a
negation, a statement less) and makes the changed source. `hunt` runs one such *mutant* in a process of its own, where
an import hook puts the changed module in place of the real one (no file is touched), and looks for a check that
fails: short simulations first, since they are cheap and find most, then the tests of the core, then more simulations.
`__main__` samples mutants by a seed, hunts them one after the other, keeps every outcome in a file as it comes, and
goes on from there when it is started again.

A mutant that no check kills either changes nothing that anybody is promised (an equivalent, a tuning constant) or shows
a gap in the tests; docs/decisions tells which of the survivors are which.
"""
