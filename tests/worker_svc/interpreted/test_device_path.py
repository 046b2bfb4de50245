"""The whole GPU path without a GPU: interpreted kernels, fake graphs and streams, two plans in flight."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from checks.driver import CPU, Driver, collect, launch, make_engine
from kernels import _dispatch
from measure.testbed.checkpoints import VOCAB_SIZE, edit_config, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.config import WorkerConfig
from tests.worker_svc.fake_accelerator import FakeAccelerator
from tests.worker_svc.oracle import Oracle, Verdict
from tests.worker_svc.test_speculation import guess
from worker_svc.execution import host_tokens
from worker_svc.execution.profiling import run_largest_step
from worker_svc.interface.plan import Plan
from worker_svc.model.loader import load_model

READ_BACK = {
    "aten._local_scalar_dense", "aten.is_nonzero", "aten.equal", "aten.nonzero", "aten.masked_select",
    "aten.unique_dim", "aten._unique2", "aten.bincount", "aten.allclose", "aten.repeat_interleave.Tensor",
}  # fmt: skip
"""Operations that read a tensor's values on the host; on a GPU they wait for everything enqueued so far."""


class NoReadBack(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on an operation that would make the host wait for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        assert not any(name == read or name.startswith(read + ".") for read in READ_BACK), f"{name} waits"
        if name.startswith(("aten.index.", "aten.index_put")):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{name} by a mask waits for the number of its elements"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[tuple[object, ...]]]:
    """Record what would be compiled for each kernel: Triton's key for every launch.

    Operations of the interpreter itself on tensors are not recorded.
    """
    found: dict[str, set[tuple[object, ...]]] = {}
    launch_of = _dispatch.Kernel.__getitem__

    def unwatched(kernel: _dispatch.Kernel, grid: Any) -> Callable[..., None]:
        launch = launch_of(kernel, grid)

        def run(*args: Any, **options: Any) -> None:
            with _disable_current_modes():
                found.setdefault(kernel.name, set()).add(specialisation(kernel, args, options))
                launch(*args, **options)

        return run

    monkeypatch.setattr(_dispatch.Kernel, "__getitem__", unwatched)
    # The host may wait here for rows that require it. It then reads tokens from pinned memory.
    wait = host_tokens.HostTokens.wait

    def waits(tokens: host_tokens.HostTokens) -> list[tuple[int, int, int]]:
        with _disable_current_modes():
            return wait(tokens)

    monkeypatch.setattr(host_tokens.HostTokens, "wait", waits)
    return found


def specialisation(kernel: _dispatch.Kernel, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[object, ...]:
    """Return Triton's key of a launch.

    The key contains the types, the values of compile-time parameters, whether an integer is 1 or divisible by 16, and
    whether a pointer is aligned to 16 bytes. Varying arguments are omitted.
    """
    key: list[object] = [tuple(sorted(options.items()))]
    for name, value in zip(kernel.function.arg_names, args, strict=False):
        if isinstance(value, torch.Tensor):
            key.append((value.dtype, name in kernel.varying or value.data_ptr() % 16 == 0))
        elif isinstance(value, int):
            key.append("int" if name in kernel.varying else (value == 1, value % 16 == 0))
        else:
            key.append(type(value))
    return tuple(key)


@contextmanager
def watched_launches(driver: Driver) -> Iterator[None]:
    """Within the block, launching a plan must not read anything back."""
    unwatched = driver.engine.launch

    def watched(plan: Plan, received_unix_ns: int) -> None:
        with NoReadBack():  # type: ignore[no-untyped-call]
            unwatched(plan, received_unix_ns)

    driver.engine.launch = watched  # type: ignore[method-assign]
    yield


SAMPLINGS = (
    plan_pb2.SamplingParams(temperature=1.0, seed=5),
    plan_pb2.SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=6),
    plan_pb2.SamplingParams(
        temperature=1.0, seed=8, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2,
        bias_token_ids=to_column([3, 4]), bias_values=b"\0\0\x80?\0\0\0@", banned_token_ids=to_column([5]),
        min_tokens=6, stop_token_ids=to_column([2]), bad_words=[to_column([7, 8]), to_column([1, 2, 3])],
    ),
    plan_pb2.SamplingParams(temperature=1.0, top_p=0.95, typical_p=0.8, seed=7, logprobs=3, prompt_logprobs=0),
)  # fmt: skip


@pytest.mark.usefixtures("compiled")
def test_tokens_are_the_oracles(tmp_path: Path) -> None:
    """Chunks, mixed steps and captured decode, two plans in flight, over kernels as they are written for a GPU.

    No step reads a value back, including those with a mixture of experts.
    """
    folder = make_checkpoint("MixtralForCausalLM", tmp_path)
    device = FakeAccelerator()
    engine = make_engine(folder, accelerator=device, block_size=8, max_num_seqs=2, max_num_batched_tokens=16)
    device.log.clear()
    driver = Driver(engine)
    prompts = [list(range(10, 29)), [7, 8, 9]]
    rows = []
    with watched_launches(driver):
        for prompt in prompts:
            rows.append(driver.admit(prompt))
            driver.chunk(rows[-1], len(prompt) // 2 + 1)
        launch(driver.engine, driver.finish_plan())
        for row, prompt in zip(rows, prompts, strict=True):
            driver.chunk(row, len(prompt) - len(prompt) // 2 - 1)
            launch(driver.engine, driver.finish_plan())
            driver.take(collect(driver.engine))
        for _ in range(3):
            launch(driver.engine, driver.finish_plan())
            driver.take(collect(driver.engine))
        driver.take(collect(driver.engine))

    assert len([entry for entry in device.log if entry.startswith("replay")]) == 6, "every step is a graph"
    oracle, verdict = Oracle(folder), Verdict()
    for row, prompt in zip(rows, prompts, strict=True):
        oracle.judge(prompt, driver.rows[row].tokens[len(prompt) :], verdict)
    assert verdict.near_ties == 0


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_are_verified_without_reading_back(graphs: bool, tmp_path: Path) -> None:
    """Steps with right and wrong drafts give the oracle's tokens, and wait only for the tokens of the step before."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    oracle, prompts = Oracle(folder), [list(range(10, 20)), [7, 8, 9]]
    engine = make_engine(
        folder, accelerator=FakeAccelerator(), block_size=8, max_num_seqs=2, max_num_batched_tokens=32,
        speculation="ngram", speculative_tokens=3, cuda_graphs=graphs,
    )  # fmt: skip
    guess(engine, [prompt + oracle.generate(prompt, 40) for prompt in prompts], seed=2)
    driver = Driver(engine)
    with watched_launches(driver):
        for row, prompt in enumerate(prompts):
            driver.admit(prompt)
            driver.chunk(row, len(prompt))
            driver.speculate(row, 3)
        launch(driver.engine, driver.finish_plan())
        for _ in range(3):
            launch(driver.engine, driver.finish_plan())
            driver.take(collect(driver.engine))
        driver.take(collect(driver.engine))

    verdict = Verdict()
    for row, prompt in enumerate(prompts):
        oracle.judge(prompt, driver.rows[row].tokens[len(prompt) :], verdict)
    assert verdict.near_ties == 0
    assert 0 < driver.num_accepted < driver.num_drafted


def test_steps_neither_read_back_nor_compile(compiled: dict[str, set[tuple[object, ...]]], tmp_path: Path) -> None:
    """Steps read no value back from the device except requested tokens, and compile each kernel once for each use.

    Rows of every kind of sampling are admitted, computed in chunks, decoded by graphs, copied, swapped and removed.
    """
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path, num_hidden_layers=1)
    settings: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4, "host_cache": "1MiB", "max_num_batched_tokens": 16}
    driver = Driver(make_engine(folder, accelerator=FakeAccelerator(), **settings))
    with watched_launches(driver):
        for index, sampling in enumerate(SAMPLINGS):
            row = driver.admit(driver.rng.integers(0, VOCAB_SIZE, 5 + index).tolist(), sampling=sampling)
            driver.chunk(row, 5 + index)
            driver.step()
        driver.step()
        spare = [driver._free.pop() for _ in range(2)]
        driver.plan.copy_sources += to_column([driver.rows[0].blocks[0]])
        driver.plan.copy_targets += to_column([spare[0]])
        driver.plan.swap_out_blocks += to_column([driver.rows[1].blocks[0]])
        driver.plan.swap_out_host_blocks += to_column([0])
        driver.plan.copy_ids += to_column([1])
        driver.hold(2)
        driver.step()
        driver.plan.swap_in_blocks += to_column([spare[1]])
        driver.plan.swap_in_host_blocks += to_column([0])
        driver.plan.copy_ids += to_column([2])
        driver.leave(3)
        sampled = driver.step()

    assert set(sampled) == {0, 1}
    assert not driver.last_result.failures
    # With and without a residual; truncated, scaled, or neither; two rounds each.
    uses = {"rms_norm_kernel": 2, "draw_tiles_kernel": 3, "pivots_kernel": 2}
    assert {name: len(keys) for name, keys in compiled.items() if len(keys) > uses.get(name, 1)} == {}
    assert {"prefill_kernel", "decode_kernel", "schedule_kernel", "select_kernel", "copy_blocks_kernel"} <= set(
        compiled
    )


def test_the_memory_profile_compiles_rare_kernels(compiled: dict[str, set[tuple[object, ...]]], tmp_path: Path) -> None:
    """The profile compiles all kernels for grammars, rules, typical-p and short chunks of long contexts.

    The engine captures no graphs here, so that only the profile can have compiled these kernels.
    """
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path, num_hidden_layers=1)
    edit_config(folder, lambda config: config.update(max_position_embeddings=2048))
    settings: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 32, "dtype": "bfloat16"}
    engine = make_engine(folder, **settings)
    model, description = load_model(WorkerConfig(model=str(folder), device="cpu", dtype="bfloat16"), CPU)
    compiled.clear()
    run_largest_step(model, engine.limits, description.dtype, CPU)
    at_start = {name: set(keys) for name, keys in compiled.items()}
    compiled.clear()

    driver = Driver(engine)
    rules = plan_pb2.SamplingParams(temperature=1.0, seed=1, presence_penalty=0.5)
    for index, sampling in enumerate((SAMPLINGS[0], rules, SAMPLINGS[3])):
        row = driver.admit([1, 2, 3], sampling=sampling)
        if index < 2:
            driver.plan.admissions[-1].grammar = plan_pb2.Grammar(regex="[ab]{6}").SerializeToString()
        driver.chunk(row, 3)
        driver.step()
    assert not driver.last_result.failures
    assert {"mask_tokens_kernel", "combine_parts_kernel"} <= set(at_start)
    late = {name: keys - at_start.get(name, set()) for name, keys in compiled.items()}
    assert {name: keys for name, keys in late.items() if keys} == {}
