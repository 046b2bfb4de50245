"""Policies, capacity and batching modes, and several workers, through the whole stack."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, serve
from quire import AsyncClient, SchedulingOptions
from quire.admin.v1 import admin_pb2, admin_pb2_grpc
from tests.e2e.load import Answer, draw_prompts, generate, generate_all, kv_memory

LENGTHS = (3, 40, 9, 70, 120, 5, 33, 64)
OUTPUTS = (30, 20, 40, 10, 25, 35, 16, 24)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "flags",
    [
        ("--policy=priority", "--batching=continuous"),
        ("--policy=sjf", "--capacity=guaranteed_no_evict"),
        ("--policy=edf", "--batching=dynamic", "--max-tokens-per-batch=200"),
        ("--policy=fair", "--scheduler-delay-factor=0.5"),
        ("--policy=lpm", "--batching=static", "--max-batch-size=3", "--max-wait-ms=20"),
    ],
    ids=" ".join,
)
def test_every_policy_and_mode_delivers_the_oracles_tokens(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Every policy delivers the reference's tokens, also when memory is short."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)
    prompts = draw_prompts(LENGTHS, oracle.vocab_size, seed=5)
    memory = kv_memory(checkpoint, num_blocks=24, block_size=16)
    with serve(checkpoint, "--dtype=float32", "--max-num-seqs=6", f"--kv-cache-memory={memory}", *flags) as served:
        answers = generate_all(served.grpc, prompts, OUTPUTS)
        if "guaranteed_no_evict" in " ".join(flags):
            assert served.metric("quire_preemptions_total") == 0
        assert served.metric("quire_kv_blocks", state="held") == 0
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == answer.max_tokens
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    assert tally.near_ties * 1000 < tally.tokens, tally


def test_scheduling_options_travel_to_the_core(tmp_path: Path) -> None:
    """Under `edf`, a later request with a target runs before one without; a missed target ends no request."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    with serve(checkpoint, "--policy=edf", "--policy-preemption=off", "--max-num-seqs=1") as served:
        assert asyncio.run(_order_of_ends(served)) == ["wanted soon", "patient"]


def test_request_classes_come_from_a_file(tmp_path: Path) -> None:
    """Requests in a class with `edf` are ordered by target; requests without a class by arrival."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    settings = tmp_path / "admission.toml"
    settings.write_text('[classes.urgent]\npolicy = "edf"\nweight = 3\n', encoding="utf-8")
    flags = (f"--admission-file={settings}", "--policy-preemption=off", "--max-num-seqs=1")
    with serve(checkpoint, *flags) as served:
        assert asyncio.run(_order_of_ends(served)) == ["patient", "wanted soon"]
        assert asyncio.run(_order_of_ends(served, "urgent")) == ["wanted soon", "patient"]


async def _order_of_ends(served: Served, request_class: str = "") -> list[str]:
    """Return the order in which two requests end that wait for a drained one-row worker until it is resumed.

    The first has no target, and the second has a near one. A third request, which has missed its target, is served as
    well.
    """
    ends: list[str] = []

    async def one(client: AsyncClient, name: str, target_s: float | None) -> None:
        options = SchedulingOptions(request_class=request_class, total_time_target_s=target_s)
        completion = await client.generate("a", max_tokens=4, ignore_eos=True, scheduling=options).result()
        assert len(completion.token_ids) == 4
        ends.append(name)

    async with AsyncClient(served.grpc) as client, grpc.aio.insecure_channel(served.grpc) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        (worker,) = (await admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
        await admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=worker.worker_id))
        async with asyncio.TaskGroup() as tasks:
            for number, (name, target_s) in enumerate((("patient", None), ("wanted soon", 40.0), ("late", 1e-9)), 1):
                tasks.create_task(one(client, name, target_s))
                while await asyncio.to_thread(served.metric, "vllm:num_requests_waiting") < number:
                    pass  # The request progresses between the two looks.
            await admin.ResumeWorker(admin_pb2.ResumeWorkerRequest(worker_id=worker.worker_id))
    ends.remove("late")
    return ends


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Oracle]]:
    """Return a service with two workers, and the reference for its tokens."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("model"))
    with serve(checkpoint, "--dtype=float32", "--workers=2") as served:
        yield served, Oracle(checkpoint)


@pytest.mark.parametrize("move", [False, True])
def test_two_workers_one_drained_under_load(move: bool, two_workers: tuple[Served, Oracle]) -> None:
    """A worker drained under load becomes idle, nothing is lost, and it can be resumed."""
    served, oracle = two_workers
    answers = [Answer(prompt, 120) for prompt in draw_prompts(LENGTHS * 2, oracle.vocab_size, seed=6)]
    asyncio.run(_drain_under_load(served.grpc, answers, move=move))
    assert served.metric("quire_kv_blocks", state="held") == 0
    assert served.metric("quire_workers") == 2
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == 120
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    assert tally.near_ties * 1000 < tally.tokens, tally
    moved = sum(answer.finished.usage.preemptions for answer in answers if answer.finished)
    assert (moved > 0) == move


async def _drain_under_load(target: str, answers: list[Answer], *, move: bool) -> None:
    async with AsyncClient(target) as client, grpc.aio.insecure_channel(target) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)

        async def workers() -> dict[str, admin_pb2.Worker]:
            response = await admin.ListWorkers(admin_pb2.ListWorkersRequest())
            return {worker.worker_id: worker for worker in response.workers}

        streams = [asyncio.create_task(generate(client, answer)) for answer in answers]
        while not all(worker.running_requests for worker in (await workers()).values()):
            pass  # The streams progress during each round trip.
        name = next(iter(await workers()))
        drained = await admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=name, move_requests=move))
        assert drained.worker.draining
        if move:
            assert drained.worker.running_requests == 0
        await asyncio.gather(*streams)
        assert (await workers())[name].running_requests == 0
        resumed = await admin.ResumeWorker(admin_pb2.ResumeWorkerRequest(worker_id=name))
        assert not resumed.worker.draining


def test_swapped_requests_deliver_the_oracles_tokens(tmp_path: Path) -> None:
    """With too little KV memory and room in the host's, paused requests come back from there, with the same tokens."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)
    prompts = draw_prompts(LENGTHS, oracle.vocab_size, seed=7)
    memory = kv_memory(checkpoint, num_blocks=16, block_size=16)
    flags = (f"--kv-cache-memory={memory}", "--host-cache=16MiB", "--max-num-seqs=8", "--dtype=float32")
    with serve(checkpoint, *flags) as served:
        answers = generate_all(served.grpc, prompts, [60] * len(prompts))
        assert served.metric("quire_swapped_out_blocks_total") > 0, "nothing was swapped: the pool is too large"
        assert served.metric("quire_swapped_in_blocks_total") > 0
        assert served.metric("quire_host_blocks_held") == served.metric("quire_kv_blocks", state="held") == 0
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == 60
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    assert tally.near_ties * 1000 < tally.tokens, tally
