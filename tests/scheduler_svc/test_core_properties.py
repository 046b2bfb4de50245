"""Properties of the scheduler core under arbitrary interleavings of all events."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import BATCHING_MODES, CAPACITY_MODES, POLICIES, BatchingLimits
from tests.examples import examples
from tests.scheduler_svc.cluster import FRONTEND, Cluster

_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("credit"), st.integers(0, 30), st.integers(1, 100)),
        st.tuples(st.just("plan"), st.just(0), st.just(0)),
        st.tuples(st.just("answer"), st.just(0), st.just(0)),
        st.tuples(st.just("kill"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("join"), st.integers(0, 1), st.integers(10, 30)),
        st.tuples(st.just("time"), st.integers(1, 400), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=_ACTIONS,
    policy=st.sampled_from(POLICIES),
    capacity=st.sampled_from(CAPACITY_MODES),
    mode=st.sampled_from(BATCHING_MODES),
    shares=st.booleans(),
    max_num_seqs=st.integers(1, 6),
    in_flight=st.integers(1, 2),
    credit=st.integers(1, 200),
)
def test_every_interleaving_keeps_every_promise(
    actions: list[tuple[str, int, int]],
    policy: str,
    capacity: str,
    mode: str,
    shares: bool,
    max_num_seqs: int,
    in_flight: int,
    credit: int,
) -> None:
    """Any order of events keeps all promises, and afterwards everything finishes.

    Blocks are conserved, and KV is never overwritten while it is read. Tokens are the model's, without gap or repeat.
    Each request ends once.
    """
    cluster = Cluster(
        policy=policy,
        capacity=capacity,
        batching=BatchingLimits(mode=mode, max_batch_size=3, max_wait_s=0.0),
        preempt_threshold=0.01,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8,
        max_plans_in_flight=in_flight,
    )
    incarnation = 0
    for action, first, second in actions:
        peers = list(cluster.core.workers())
        match action:
            case "submit":
                stream = len(cluster.readers)
                stops = set(expected_output([stream % 2], 9, set())[-1:])
                cluster.submit(
                    stream,
                    [stream % 2, *range(1, first)],
                    second,
                    stops=stops,
                    credit=4 * credit,
                    tenant=f"t{stream % 3}",
                    priority=stream % 4,
                    ttft_deadline=cluster.now + 100.0,
                )
            case "cancel":
                cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=first))
            case "credit":
                cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=first, credit=second))
            case "plan":
                cluster.plan()
            case "answer":
                cluster.answer()
            case "kill" if first < len(peers):
                cluster.lose(peers[first])
            case "join":
                incarnation += 1
                cluster.join(ModelWorker(b"w/%d" % incarnation, second, 4, 5, 8, num_host_blocks=second), f"w{first}")
            case "time":
                cluster.now += first / 1000
                cluster.handle(ev.TimePassed())

    for peer in list(cluster.core.workers()):
        cluster.lose(peer)
    cluster.join(ModelWorker(b"last", 20, 4, 8, 8), "last")
    for stream in cluster.readers:
        cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=stream, credit=10_000))
    cluster.run()
    for reader in cluster.readers.values():
        assert reader.end is not None
        whole = expected_output(reader.prompt, reader.max_tokens, reader.stops)
        if reader.end.reason in (ef.EndReason.STOP, ef.EndReason.LENGTH):
            # The context may end before max_tokens is reached.
            assert reader.tokens == whole or len(reader.prompt) + len(reader.tokens) >= 40
        assert reader.tokens == whole[: len(reader.tokens)]
    (worker,) = cluster.core.stats().workers
    assert worker.blocks_free + worker.blocks_cached == worker.blocks_total
