"""The stories and figures of live and ended requests, for operators."""

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.requests.history import MAX_ENDED
from tests.scheduler_svc.cluster import FRONTEND, Cluster


def joined_cluster() -> Cluster:
    """A cluster with one worker."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    return cluster


def test_a_story_is_told_from_arrival_to_end() -> None:
    """Arrival, admission and end, in order and with times that do not go back."""
    cluster = joined_cluster()
    cluster.submit(1, [1, 2, 3], 4)
    cluster.run()
    (story,) = cluster.core.stories("r1")
    times = [moment for moment, _ in story.events]

    assert not story.live
    events = ["arrived", "admitted to w row 0", "first token", "ended: length, 4 tokens"]
    assert [what for _, what in story.events] == events
    assert times == sorted(times)


def test_a_live_request_is_listed_with_what_it_has() -> None:
    """A running request is listed with its worker and progress; a waiting request is listed as waiting."""
    cluster = Cluster(max_num_seqs=1)
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    cluster.submit(1, [1, 2, 3], 40)
    cluster.submit(2, [4], 5)
    for _ in range(4):
        cluster.plan()
        cluster.answer()
    running, waiting = cluster.core.requests(10)

    assert (running.request_id, running.state, running.worker_id) == ("r1", "running", "w")
    assert (running.prompt_tokens, running.max_tokens) == (3, 40)
    assert running.generated_tokens == len(cluster.readers[1].tokens) > 0
    assert (waiting.request_id, waiting.state, waiting.worker_id) == ("r2", "waiting", "")
    assert len(cluster.core.requests(1)) == 1
    assert cluster.core.cancelling("r2") == [ev.RequestCancelled(frontend=FRONTEND, stream=2)]
    assert cluster.core.stories("r1")[0].live


def test_the_newest_ends_are_kept_and_no_more() -> None:
    """Memory is bounded: of more requests than are kept, the oldest are forgotten."""
    cluster = Cluster()
    for stream in range(MAX_ENDED + 5):
        cluster.submit(stream, [1], 1)
        cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=stream))

    assert cluster.core.stories("r4") == []
    (story,) = cluster.core.stories("r5")
    assert [what for _, what in story.events] == [
        "arrived",
        "waits for a worker that can serve it",
        "ended: cancelled, 0 tokens",
    ]
