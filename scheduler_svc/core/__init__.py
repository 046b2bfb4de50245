"""The scheduler core: a pure state machine that turns events into effects and plans.

How it works. `Scheduler.handle(event, now)` takes one event (a request arrived, a step was answered, a worker joined,
time passed, …) and returns effects (tokens for a front end, a request ended, a worker welcomed, …).
`Scheduler.plan(worker, now)` returns the next plan for a worker, or None when there is nothing to do or
it is too early.
Time is an argument, randomness is an argument, nothing here reads a clock, a socket or a file; the same events give the
same effects and plans.

Read the modules in this order:

* `events`, `effects`, `plan` – what goes in and what comes out.
* `request` – one request and its tokens; `waiting` – the queue of requests that are not running.
* `block_pool` – KV blocks and when a freed block may be handed out again.
* `rows` – the running requests of one worker as a struct of arrays.
* `step_clock` – how long steps take: when to send the next plan, when to give a worker up.
* `worker` – one worker in one epoch: pool, rows, steps in flight.
* `planner` – what the next step holds: decodes first, then prompts in chunks, then admissions.
* `commit` – what an answered step means for its requests.
* `scheduler` – the state machine itself: routes events, owns requests, ends each exactly once.
"""
