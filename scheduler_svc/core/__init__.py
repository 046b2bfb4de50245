"""The scheduler core: a pure state machine that turns events into effects and plans.

How it works. `Scheduler.handle(event, now)` takes one event (a request arrived, a step was answered, a worker joined,
time passed, …) and returns effects (tokens for a front end, a request ended, a worker welcomed, …).
`Scheduler.plan(worker, now)` returns the next plan for a worker, or None when there is nothing to do or
it is too early.
Time is an argument, randomness is an argument, nothing here reads a clock, a socket or a file; the same events give the
same effects and plans.

Read the modules in this order:

* `arrays` – the array types; `records` – what is known of a request outside; `events`, `effects`, `plan` – what goes in
  and what comes out; `config`, `errors`.
* `request` – one request and its tokens; `accounts` – to whom its service counts; `waiting` – the orders of admission;
  `tenants` – limits per tenant.
* `block_pool` – KV blocks and when one may be handed out again; `prefix_cache` – which block holds which prefix;
  `partial_blocks` – which ones are worth a copy.
* `rows` – the running requests of one worker as a struct of arrays.
* `step_clock` – how long steps take: when to send the next plan, when to give a worker up; `forecast` – what a request
  will probably cost.
* `grammars` – what a worker has compiled.
* `swapping` – whose KV is kept in a worker's host memory, and when that pays.
* `worker` – one worker in one epoch: pool, rows, steps in flight; `fleet` – who may join, who is given up.
* `capacity`, `batching`, `placement`, `victims` – small policies; `admission` – which waiting
  requests a worker takes in.
* `suspicion` – which request kills workers.
* `growth` – blocks for rows that decode on, and who gives way.
* `chunks` – how long a chunk of a prompt may be.
* `planner` – what the next step holds: decodes first, then prompts in chunks, then admissions.
* `commit` – what an answered step means for its requests; `frontends` – who is told its tokens.
* `kept` – what is left of requests whose clients may come back; `identified` – these requests, live and over;
  `history` – what became of those that are over.
* `intake` – who may wait at all; `timeouts` – whose time is up.
* `registry` – all live requests: who waits, who runs; ends each exactly once.
* `scheduler` – the state machine itself: routes events to these; `stats` – its state in figures.
"""
