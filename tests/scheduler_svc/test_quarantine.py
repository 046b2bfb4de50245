"""Poison requests: a request that kills workers is found and rejected, and no other is."""

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.workers.quarantine import FATAL_ALONE, FATAL_STEPS, PROVEN_BY, Quarantine
from shared.frames import TOKEN_BYTES
from tests.scheduler_svc.cluster import FRONTEND, Cluster
from tests.scheduler_svc.requests import make_request

POISON = 666
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64}


class Ward:
    """A cluster whose worker dies in every step that computes the poison, and returns."""

    def __init__(self, **limits: object) -> None:
        self.cluster = Cluster(**(LIMITS | limits))
        self.deaths = 0
        self.alone: list[bool] = []
        """For each death, whether the step held one request only."""
        self._join()

    def run(self) -> None:
        """Plans and answers until nothing is left to do."""
        cluster = self.cluster
        for _ in range(2000):
            planned = 0
            for peer in cluster.core.workers():
                planned += self._plan(peer)
            if not planned + cluster.answer():
                return
        raise AssertionError("the cluster does not come to rest")

    def lose(self, *, orderly: bool = False) -> None:
        """The worker is lost with whatever it computes, and another one joins."""
        (peer,) = self.cluster.core.workers()
        self.cluster.answers[peer].clear()
        self.cluster.handle(ev.WorkerLost(worker=peer, reason="killed", orderly=orderly))
        self._join()

    def _plan(self, peer: bytes) -> int:
        cluster = self.cluster
        plan = cluster._plan_when_due(peer)
        if plan is None:
            return 0
        worker = cluster.workers[peer]
        answer = worker.execute(plan)
        rows = worker.step_rows
        if any(POISON in row.tokens for row in rows):
            self.deaths += 1
            self.alone.append(len(rows) == 1)
            self.lose()
        else:
            cluster.answers[peer].append(answer)
        return 1

    def _join(self) -> None:
        self.cluster.join(ModelWorker(b"w/%d" % self.deaths, 200, 4, 8))


def _ends(cluster: Cluster) -> dict[int, ef.EndReason]:
    return {stream: reader.end.reason for stream, reader in cluster.readers.items() if reader.end is not None}


def test_only_the_poison_request_is_rejected() -> None:
    """After two deaths in a batch and two alone, the request ends with POISON; all others complete."""
    ward = Ward()
    for stream in range(5):
        ward.cluster.submit(stream, [stream + 1, 2, 3], 30)
    ward.cluster.plan()
    ward.cluster.answer()
    poison = ward.cluster.submit(9, [7, POISON, 8], 30)

    ward.run()

    assert ward.deaths == FATAL_STEPS + FATAL_ALONE
    assert ward.alone[-FATAL_ALONE:] == [True] * FATAL_ALONE
    assert poison.end is not None
    assert (poison.end.reason, poison.end.request_id) == (ef.EndReason.POISON, "r9")
    del ward.cluster.readers[9]
    for reader in ward.cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, 30, set())


def test_several_poison_requests_are_told_from_the_innocent() -> None:
    """Each poison request is rejected after its own step, regardless of their number and prompt lengths."""
    ward = Ward(max_num_batched_tokens=16)
    for stream in range(6):
        prompt = [*range(40), POISON] if stream % 2 else [*range(stream, stream + 40)]
        ward.cluster.submit(stream, prompt, 20)

    ward.run()

    ends = _ends(ward.cluster)
    assert [stream for stream, end in ends.items() if end is ef.EndReason.POISON] == [1, 3, 5]
    assert all(ends[stream] is ef.EndReason.LENGTH for stream in (0, 2, 4))


def test_a_waiting_request_that_becomes_a_suspect_is_no_longer_the_shortest() -> None:
    """A waiting request that becomes a suspect is no longer found by length, only among the suspects."""
    cluster = Cluster(max_num_seqs=1, max_num_batched_tokens=16, policy="priority", policy_preemption="off")
    cluster.join(ModelWorker(b"w1", num_blocks=64, block_size=4, max_rows=1, max_tokens_per_step=16))
    cluster.submit(1, [1] * 40, 20)
    cluster.plan()
    cluster.submit(2, [2], 5)
    backlog = cluster.core._requests.backlog
    worker = next(iter(cluster.core._fleet))
    request = backlog.take_short(worker, None)
    assert request is not None
    request.faults.suspect = True
    backlog.put_back(request)

    assert backlog.take_short(worker, None) is None
    assert backlog.take_suspect() is request


def test_a_suspect_that_survives_alone_is_cleared() -> None:
    """After two fatal steps a request runs alone until it has got tokens, and then with the others again."""
    ward = Ward()
    readers = [ward.cluster.submit(stream, [stream + 1, 2, 3], 30) for stream in range(3)]
    for _ in range(FATAL_STEPS):
        ward.cluster.plan()
        ward.lose()

    sizes = []
    for _ in range(200):
        for peer in ward.cluster.core.workers():
            plan = ward.cluster._plan_when_due(peer)
            if plan is not None:
                worker = ward.cluster.workers[peer]
                ward.cluster.answers[peer].append(worker.execute(plan))
                sizes.append(len(worker.step_rows))
        ward.cluster.answer()

    assert sizes[:2] == [1, 1]
    assert max(sizes) == 3
    for reader in readers:
        assert reader.tokens == expected_output(reader.prompt, 30, set())


def test_a_suspect_whose_reader_pauses_runs_alone_when_it_goes_on() -> None:
    """A suspect request whose reader takes output again during the trial of another one runs in a step of its own."""
    ward = Ward()
    cluster = ward.cluster
    for stream in (1, 2):
        cluster.submit(stream, [stream, 5, 6], 9, credit=TOKEN_BYTES)
    for _ in range(FATAL_STEPS):
        cluster.plan()
        ward.lose()
    (peer,) = cluster.core.workers()
    worker = cluster.workers[peer]
    sizes: list[int] = []

    def step() -> None:
        plan = cluster._plan_when_due(peer)
        assert plan is not None
        cluster.answers[peer].append(worker.execute(plan))
        sizes.append(len(worker.step_rows))

    step()  # The first suspect's prompt. Its reader then takes no more.
    cluster.answer()
    step()  # The second suspect's prompt, while the first reader takes more and an innocent request arrives.
    cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=1, credit=9 * TOKEN_BYTES))
    cluster.submit(3, [9, 9, 9], 2)
    cluster.answer()
    step()
    assert sizes == [1, 1, 1]
    cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=2, credit=9 * TOKEN_BYTES))
    ward.run()

    assert _ends(cluster) == dict.fromkeys((1, 2, 3), ef.EndReason.LENGTH)


def test_one_death_alone_condemns_nobody() -> None:
    """A worker that is struck while it tries an innocent: the request is tried once more, and goes on."""
    ward = Ward()
    reader = ward.cluster.submit(0, [1, 2, 3], 30)
    for _ in range(FATAL_STEPS + FATAL_ALONE - 1):
        ward.cluster.plan()
        ward.lose()
    ward.run()

    assert reader.tokens == expected_output([1, 2, 3], 30, set())


def test_a_request_that_gets_tokens_between_deaths_is_no_suspect() -> None:
    """Workers that die repeatedly from other causes make no request a suspect."""
    ward = Ward()
    readers = [ward.cluster.submit(stream, [stream + 1, 2, 3], 60) for stream in range(3)]
    for _ in range(6):
        for _ in range(PROVEN_BY + 2):
            ward.cluster.plan()
            ward.cluster.answer()
        ward.cluster.plan()
        assert all(worker.rows_running == 3 for worker in ward.cluster.core.stats().workers)
        ward.lose()
    ward.run()

    for reader in readers:
        assert reader.tokens == expected_output(reader.prompt, 60, set())


def test_a_worker_that_says_goodbye_makes_no_suspects() -> None:
    """Workers that are restarted one after the other make no suspects."""
    ward = Ward()
    reader = ward.cluster.submit(0, [1, 2, 3], 10)
    for _ in range(5):
        ward.cluster.plan()
        ward.lose(orderly=True)
    ward.run()

    assert reader.tokens == expected_output([1, 2, 3], 10, set())


def test_a_suspect_that_is_cancelled_leaves_the_others_alone() -> None:
    """A trial ends with its request."""
    ward = Ward()
    readers = [ward.cluster.submit(stream, [stream + 1, 2, 3], 20) for stream in range(2)]
    for _ in range(FATAL_STEPS):
        ward.cluster.plan()
        ward.lose()
    ward.cluster.plan()
    ward.cluster.handle(ev.RequestCancelled(frontend=b"front/1", stream=0))
    ward.run()

    assert readers[1].tokens == expected_output([2, 2, 3], 20, set())


def test_a_withdrawn_fatal_step_does_not_count_towards_the_rejection() -> None:
    """If a worker returns while its suspect runs alone elsewhere, rejecting the suspect takes one more death."""
    quarantine, request = Quarantine(), make_request()
    for worker_id in ("a", "b"):
        assert quarantine.worker_lost(worker_id, [request], alone=False, now=1.0) == []
    assert request.faults.suspect
    assert quarantine.worker_survived("b") == [request]
    assert not request.faults.suspect

    for _ in range(FATAL_ALONE):
        assert quarantine.worker_lost("c", [request], alone=True, now=2.0) == []
    assert quarantine.worker_lost("c", [request], alone=True, now=3.0) == [request]


def test_a_wrong_answer_blames_no_request() -> None:
    """The core removes a worker that sends a wrong result, and its requests do not become suspects."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    cluster.submit(1, [1, 2], 9)
    cluster.plan()
    wrong = cluster.answers[b"w/1"].popleft()
    wrong.step += 1
    cluster.handle(wrong)
    assert [what for what in cluster.story(1) if "fatal" in what] == []
