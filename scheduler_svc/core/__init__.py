"""Scheduler core: a pure state machine that turns events into effects and plans.

How it works:

* `Scheduler.handle(event, now)` takes one event and returns effects. Events: a request arrived, a step was answered, a
  worker joined, time passed, … Effects: tokens for a front end, a request ended, a worker welcomed, …
* `Scheduler.plan(worker, now)` returns the next plan for a worker and the effects of planning. The plan is None when
  there is nothing to do or it is too early.

Time and randomness are arguments. Nothing here reads a clock, a socket or a file. The same events give the same effects
and plans.

Read the packages in this order; each imports only those before it:

* `interface` – events, effects, plans and limits, as plain values.
* `memory` – the blocks of a worker's KV cache and what they contain.
* `requests` – one request, and what is kept of it.
* `workers` – one worker in one epoch, and the fleet.
* `queueing` – the waiting requests: order, quotas, placement.
* `lifecycle` – all live requests: the table of their states, and their end, exactly once.
* `planning` – the next step of a worker, and what its answer means.
* `scheduler` – the state machine itself, which routes events to the others.
"""
