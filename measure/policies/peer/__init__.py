"""Schedulers from other servers. Each runs in a process with its own environment.

The program is `python -m measure.policies.peer.NAME`. A process reads one JSON object per line and responds to each
with one. No module here runs in Quire's own environment.

| `op` | fields | answer |
|---|---|---|
| `start` | `costs`, `policy`, `settings`, `workers`, `in_flight` | `version`, `settings` |
| `next` | `worker`, `now`, `jobs`: those that arrived since | `work` of its next step, or null; `cpu_s` so far |
| `done` | `worker`, whose oldest step is done | `tokens`: numbers of jobs; `ended`; `cpu_s` so far |

A job is `[number, pieces of the prompt, piece of the outputs, priority]`, a piece `[name, length]`; `work` has the
fields of `costs.Work`; an end is `[number, outputs, cached, preemptions]`.
"""
