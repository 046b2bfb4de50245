"""Standbys on other machines: replication of the journal, and the change of the leader.

The leader sends its journal to each standby, which writes the same content to its own folder. A standby that takes over
therefore recovers like a scheduler that restarts. Everything else comes from front ends and workers, as after a
restart.

* `leader_number`: the number under which a scheduler leads, and its file.
* `cursor`: how far a standby is in the leader's segments, and what it gets next.
* `peers`: sockets between schedulers.
* `leading`: the leader's side, called by the loop of the scheduler service.
* `mirror`: the folder that a standby writes.
* `waiting`: the standby's side, until it leads.
* `election`: the lease in a store, through which one of several schedulers leads; `stores`: etcd and Kubernetes.
* `tenure`: the time in which a scheduler may lead by its lease, and its number.
* `guard`: a process that revokes the lease when the scheduler's process dies.
* `take_over`: the operator's command.
"""
