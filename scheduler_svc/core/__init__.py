"""Scheduler core: a pure state machine that turns events into effects and plans.

How it works:

* `Scheduler.handle(event, now)` takes one event and returns effects. An event is, for example, the arrival of a request
  or a step result, a joining worker, or the passing of time. An effect is, for example, tokens for a front end, the end
  of a request, or the welcome for a worker.
* `Scheduler.plan(worker, now)` returns the next plan for a worker and the effects of planning. The plan is None when
  there is nothing to do or it is too early.

Time and randomness are arguments. The core reads no clock, socket or file. The same events give the same effects and
plans.

Read the packages in this order. Each package imports only the packages before it:

* `interface` – events, effects, plans and limits, as plain values.
* `memory` – the blocks of a worker's KV cache and what they contain.
* `requests` – one request, and the log that is retained for it.
* `workers` – one worker in one epoch, and the fleet.
* `queueing` – the waiting requests: order, quotas, placement.
* `lifecycle` – all live requests: their states, and their end, which happens exactly once.
* `planning` – a worker's next step, and the handling of step results.
* `scheduler` – the state machine itself, which routes events to the others.
"""
