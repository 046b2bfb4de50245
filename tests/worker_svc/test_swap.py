"""What the worker's host pool promises: KV that was swapped out comes back as it was."""

from pathlib import Path

import pytest

from checks.driver import Driver, collect, execute, launch, make_engine
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import from_column, to_column
from tests.worker_svc.fake_accelerator import FakeAccelerator


@pytest.mark.parametrize(
    ("architecture", "accelerator", "kind"),
    [
        ("LlamaForCausalLM", None, "auto"),
        ("LlamaForCausalLM", FakeAccelerator(), "auto"),
        ("LlamaForCausalLM", None, "int8"),
        ("DeepseekV3ForCausalLM", None, "auto"),
        ("DeepseekV3ForCausalLM", FakeAccelerator(), "auto"),
        ("DeepseekV3ForCausalLM", None, "int8"),
    ],
    ids=["cpu", "accelerator", "int8", "latent", "latent, accelerator", "latent, int8"],
)
def test_swapped_kv_comes_back_as_it_was(
    tmp_path: Path, architecture: str, accelerator: FakeAccelerator | None, kind: str
) -> None:
    """A row that was swapped out and into other blocks continues with the same tokens and computes one.

    Another row overwrote its blocks in the meantime. The copies are reported as done.
    """
    folder = make_checkpoint(architecture, tmp_path)
    prompt, other = ([(7 * index + start) % VOCAB_SIZE for index in range(20)] for start in (3, 5))
    expected = Driver(make_engine(folder, block_size=8, kv_cache_dtype=kind)).generate(prompt, 4)
    engine = make_engine(
        folder, accelerator=accelerator, block_size=8, max_num_seqs=2, host_cache="1MiB", kv_cache_dtype=kind
    )

    def admission(row: int, generation: int, tokens: list[int], blocks: list[int], computed: int) -> plan_pb2.Admission:
        return plan_pb2.Admission(
            row=row, generation=generation, token_ids=to_column(tokens), block_tables=[to_column(blocks)],
            num_prompt_tokens=20, num_computed_tokens=computed,
        )  # fmt: skip

    first = execute(
        engine,
        plan_pb2.Plan(
            step=1,
            admissions=[admission(0, 1, prompt, [1, 2, 3], 0)],
            chunk_rows=to_column([0]),
            chunk_lengths=to_column([20]),
        ),
    )
    assert from_column(first.tokens).tolist() == expected[:1]
    swapped = execute(
        engine,
        plan_pb2.Plan(
            step=2,
            leaves=to_column([0]),
            swap_out_blocks=to_column([1, 2, 3]),
            swap_out_host_blocks=to_column([4, 0, 2]),
            copy_ids=to_column([11]),
            admissions=[admission(0, 2, other, [1, 2, 3], 0)],
            chunk_rows=to_column([0]),
            chunk_lengths=to_column([20]),
        ),
    )
    assert from_column(swapped.completed_copies).tolist() == [11]
    assert swapped.timings.copied_blocks == 3
    tokens = [*prompt, *expected[:1]]
    back = execute(
        engine,
        plan_pb2.Plan(
            step=3,
            leaves=to_column([0]),
            admissions=[admission(1, 1, tokens, [9, 8, 7], 20)],
            swap_in_host_blocks=to_column([4, 0, 2]),
            swap_in_blocks=to_column([9, 8, 7]),
            copy_ids=to_column([12]),
            chunk_rows=to_column([1]),
            chunk_lengths=to_column([1]),
        ),
    )
    later = [execute(engine, plan_pb2.Plan(step=step)) for step in (4, 5)]
    assert [from_column(result.tokens).tolist() for result in (back, *later)] == [[token] for token in expected[1:]]


def test_copies_run_beside_the_steps(tmp_path: Path) -> None:
    """On an accelerator, copies run beside the steps and wait only where they must.

    A swap-out waits for the steps before it, and a swap-in for the swap-out that wrote its source. Steps wait only for
    copies of blocks that their plan uses. The result of a plan is sent after its copies.
    """
    device = FakeAccelerator()
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    engine = make_engine(folder, accelerator=device, block_size=8, host_cache="1MiB", cuda_graphs=False)

    def waiting(plan: plan_pb2.Plan) -> list[str]:
        device.log.clear()
        launch(engine, plan)
        return ["copies" if entry.startswith("stream") else "steps" for entry in device.log if "waits" in entry]

    out = plan_pb2.Plan(
        step=1,
        swap_out_blocks=to_column([1, 2]),
        swap_out_host_blocks=to_column([0, 1]),
        copy_ids=to_column([7]),
    )
    back = plan_pb2.Plan(
        step=2,
        swap_in_host_blocks=to_column([0, 1]),
        swap_in_blocks=to_column([5, 6]),
        copy_ids=to_column([8]),
    )
    overwrites = plan_pb2.Plan(copy_sources=to_column([9]), copy_targets=to_column([2]))
    overwrites.MergeFrom(out)

    assert waiting(out) == ["copies"]
    assert not engine.ready()
    assert from_column(collect(engine).completed_copies).tolist() == [7]
    assert waiting(back) == []
    assert waiting(overwrites) == ["copies", "copies", "steps"]
    uses = plan_pb2.Plan(
        step=4,
        admissions=[
            plan_pb2.Admission(
                generation=1,
                token_ids=to_column(list(range(3, 20))),
                block_tables=[to_column([5, 6, 7])],
                num_prompt_tokens=17,
                num_computed_tokens=16,
            )
        ],
        chunk_rows=to_column([0]),
        chunk_lengths=to_column([1]),
    )
    assert waiting(uses) == ["steps", "copies"], "the copies after the step are those of its results"
    results = [collect(engine) for _ in range(3)]
    assert [from_column(result.completed_copies).tolist() for result in results] == [[8], [7], []]
    assert [result.timings.copied_blocks for result in results] == [2, 2, 0]
    assert [result.timings.copy_delay_ns > 0 for result in results] == [False, True, True]


def test_copies_on_a_cpu_delay_the_step(tmp_path: Path) -> None:
    """A worker without an accelerator reports the whole time of its copies as a delay."""
    engine = make_engine(make_checkpoint("LlamaForCausalLM", tmp_path), block_size=8, host_cache="1MiB")
    launch(
        engine,
        plan_pb2.Plan(
            step=1,
            swap_out_blocks=to_column([1, 2]),
            swap_out_host_blocks=to_column([0, 1]),
            copy_ids=to_column([7]),
        ),
    )
    timings = collect(engine).timings
    assert timings.copy_delay_ns == timings.copy_ns > 0
