"""Promises that the core is known not to keep yet: seen, counted, and not held against a simulation.

An entry is a check's name and why it is here. The list is meant to be empty; a campaign prints how often each was seen.
"""

KNOWN: dict[str, str] = {
    "worker.overdue": "with two plans in flight each deadline is added to the one before, without end",
    "stream.credit": "a preempted request is admitted without credit after a late token has used it up",
    "preempt.progress": "memory pressure preempts a request again that has made no progress",
    "order.overtaken": "admissions of one plan count only after it, so the bound is passed by up to a plan's rows",
    "order.elsewhere": "a request that placement leaves to another worker may be overtaken without a bound",
}
