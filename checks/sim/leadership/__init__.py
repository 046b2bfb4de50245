"""Simulation of leases: schedulers with clocks of their own, a store, a network with faults, workers and a front end.

    python -m checks.sim.leadership --seeds 200

The decisions are the real ones: `scheduler_svc.standby.tenure`, `scheduler_svc.standby.cursor` and
`shared.schedulers`. The store is a model with the rules of etcd: one lease for one key, compare-and-swap of the number,
revocation by the id of a lease. The journal, its copies and the workers are models (`models`). Faults stop and continue
processes between a check and a send, kill them in any state, also while they take over, cut them off from the store,
the other schedulers or all processes, make a standby slow, and delay every message. The clocks of the schedulers have
any offset and run at different speeds. The journal is synchronous.

Promises:

* number: no two tenures have the same number, and numbers increase.
* one: at no time may two schedulers send.
* fenced: the front end accepts no frame of a scheduler after a state of a scheduler with a higher number.
* joined: a worker joins no scheduler with a lower number than one that it has joined.
* stream: the tokens that the front end accepts have no gap, none is repeated, and each was computed after exactly the
  tokens that the front end has.
* twice: of the workers that compute the same position of the stream at the same time, at most one is connected to a
  scheduler that may send.
* copy: a standby with the whole journal has the tokens of the leader.
* tail: a standby with the whole journal that no fault has disturbed has all delivered tokens when it takes over.
* whole: a standby that may have missed a part of the journal does not take over while it hears the leader.
* guard: only the lease of a dead process is revoked by its guard.
* progress: tokens are delivered while no fault disturbs the leader and a worker, whatever happens to standbys.
* liveness: some scheduler leads again after all faults have ended, and all others have its whole journal.

`events` has the time and the network, `replication` leader and standby, `fleet` the workers, and `world` leases, the
front end and faults.
"""
