"""KV groups: which layers share blocks, and a row's tables for windows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from checks.driver import CPU, Driver, make_engine
from kernels.block_copy import BlockPool, copy_blocks
from kernels.kv_cache_reference import read_kv, write_kv_reference
from kernels.kv_quantised import INT4
from kernels.native.library import native_levels
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.kv_sizes import MAX_WINDOW_ENTRIES
from tests.cpu_kernels import cpu_kernels
from tests.gemma_4 import GEMMA_4
from tests.worker_svc.oracle import Oracle, Verdict
from tests.worker_svc.test_oracle import OUTPUT_LENGTH, generate_all
from tests.worker_svc.test_speculation import guess
from worker_svc.interface.errors import PlanError
from worker_svc.interface.limits import Limits
from worker_svc.link.decoding import decode_plan
from worker_svc.memory.kv_groups import KVGroups, divide
from worker_svc.memory.kv_pool import allocate, layer_bytes
from worker_svc.memory.kv_views import layer_caches, window_slots, window_tables
from worker_svc.model.base import KVShape
from worker_svc.rows.table import RowTable

SIZE = (128, 128)
LIMITS = Limits(
    max_rows=2, max_tokens_per_step=64, max_model_len=80, block_size=4, num_blocks=50, vocab_size=100,
    num_kv_groups=3, window=6, window_chunk=8,
)  # fmt: skip


def _divide(
    sizes: list[tuple[int, int]],
    windows: list[int | None],
    *,
    max_model_len: int = 1000,
    block_size: int = 12,
    memory: int = 0,
) -> KVGroups | str:
    return divide(sizes, windows, max_model_len=max_model_len, chunk=10, block_size=block_size, memory=memory)


def test_layers_are_divided_by_their_windows() -> None:
    """Layers without a window form the first group, and the others groups of at most as many layers."""
    groups = _divide([SIZE] * 8, [5, 5, None, 5, 5, None, 3, 5])

    assert not isinstance(groups, str)
    assert groups.groups == (1, 1, 0, 2, 2, 0, 3, 3)
    assert groups.places == (0, 1, 0, 0, 1, 1, 0, 1)
    assert (groups.num_groups, groups.num_places, groups.window) == (4, 2, 5)


@pytest.mark.parametrize(
    ("windows", "max_model_len", "num_layer_blocks", "reason"),
    [
        ([], 1000, 0, ""),
        ([None] * 8, 1000, 0, ""),
        ([5] * 8, 15, 0, "no sequence exceeds the window and a chunk (5 + 10 tokens)"),
        ([5, None] * 4, 15, 0, "no sequence exceeds the window and a chunk (5 + 10 tokens)"),
        ([5, None] * 4, 5, 0, "no sequence exceeds the window and a chunk (5 + 10 tokens)"),
        # Three quarters of a block would be empty in the second group.
        ([5, None, None, None] * 2, 1000, 0, "room for 4 unused layers, more than 15% of the model's KV"),
        ([None] + [5] * 64, 1000, 0, "blocks of 1 layers would need more than 64 tables per row"),
        ([5, None], 1000, MAX_WINDOW_ENTRIES + 1, "more blocks than the scheduler's table"),
        ([5], 1000, 0, "the model has one layer"),
    ],
)
def test_other_models_have_one_group(
    windows: list[int | None], max_model_len: int, num_layer_blocks: int, reason: str
) -> None:
    """Without a window, with short sequences only, or with much unused memory, blocks hold all layers."""
    groups = _divide(
        [SIZE] * len(windows), windows, max_model_len=max_model_len, memory=num_layer_blocks * 12 * sum(SIZE)
    )

    assert isinstance(groups, str)
    assert reason in groups
    assert bool(reason) == bool(groups)


@pytest.mark.parametrize(
    ("num_layers", "max_model_len", "num_layer_blocks", "num_groups", "num_places"),
    [
        (8, 1000, 0, 8, 1),
        (126, 1000, 0, 63, 2),  # One layer per group would be more than 64 groups.
        (80, 1000, 1 << 22, 20, 4),  # A block per layer would be too many blocks for the scheduler's table.
        (7, 16, 0, 7, 1),
    ],
)
def test_first_layers_are_kept_if_all_have_a_window(
    num_layers: int, max_model_len: int, num_layer_blocks: int, num_groups: int, num_places: int
) -> None:
    """The first group has the fewest layers for which the number of groups and of blocks is not too large."""
    memory = num_layer_blocks * 12 * sum(SIZE)
    groups = _divide([SIZE] * num_layers, [5] * num_layers, max_model_len=max_model_len, memory=memory)

    assert not isinstance(groups, str)
    assert groups.groups == tuple(layer // num_places for layer in range(num_layers))
    assert groups.places == tuple(layer % num_places for layer in range(num_layers))
    assert (groups.num_groups, groups.window) == (num_groups, 5)


def test_the_scheduler_accepts_the_number_of_blocks() -> None:
    """With the largest number of blocks per layer, the scheduler's table of window blocks has room for all."""
    for num_layer_blocks in range(1 << 16, 1 << 24, 1 << 16):
        groups = _divide([SIZE] * 32, [5] * 32, memory=num_layer_blocks * 12 * sum(SIZE))
        if not isinstance(groups, str):
            assert num_layer_blocks // groups.num_places * (groups.num_groups - 1) <= MAX_WINDOW_ENTRIES


def _of_size(size: int) -> tuple[int, int]:
    return 64 * size, 64 * size


def test_smaller_layers_with_a_window_share_places() -> None:
    """In a block with two places, each place holds three layers with a window of a third of the size."""
    sizes = [_of_size(size) for size in (1, 1, 3, 1, 1, 1, 3, 1)]

    groups = _divide(sizes, [5, 5, None, 5, 5, 5, None, 5])

    assert not isinstance(groups, str)
    assert (groups.num_groups, groups.num_places, groups.layers_per_place, groups.groups_per_layer) == (2, 2, 3, 1)
    assert groups.groups == (1, 1, 0, 1, 1, 1, 0, 1)
    assert groups.places == (0, 0, 0, 0, 1, 1, 1, 1)
    assert groups.parts == (0, 1, 0, 2, 0, 1, 0, 2)
    assert groups.table_numbers == (1, 2, 0, 3, 1, 2, 0, 3)


def test_larger_layers_with_a_window_are_divided_among_groups() -> None:
    """A layer with a window of three times the size has a third of its tokens in each of three groups."""
    sizes = [_of_size(size) for size in (3, 3, 1, 3, 3, 1)]

    groups = _divide(sizes, [5, 5, None, 5, 5, None])

    assert not isinstance(groups, str)
    assert (groups.num_groups, groups.num_places, groups.layers_per_place, groups.groups_per_layer) == (7, 2, 1, 3)
    assert groups.groups == (1, 1, 0, 4, 4, 0)
    assert groups.places == (0, 1, 0, 0, 1, 1)
    assert groups.table_numbers == (1, 1, 0, 2, 2, 0)


@pytest.mark.parametrize(
    ("sizes", "windows", "block_size", "reason"),
    [
        ([(3, 3)] * 2 + [(2, 2)], [5, 5, None], 12, "neither is a multiple"),
        ([(2, 4)] * 2 + [(1, 1)], [5, 5, None], 12, "neither is a multiple"),
        ([(1, 1)] * 2 + [(1, 1 << 20)], [5, 5, None], 12, "neither is a multiple"),
        ([(1, 1), (2, 2), (2, 2)], [5, 5, None], 12, "with a window, or those without, store KV of different sizes"),
        ([(1, 1), (1, 1), (2, 2)], [5, None, None], 12, "with a window, or those without, store KV of different sizes"),
        ([(2, 2)] * 2 + [(1, 1)], [5, 5, None], 13, "a block of 13 tokens cannot be divided by 2"),
        # One of three parts in the block for windows would be unused.
        ([(1, 1)] * 2 + [(3, 3)], [5, 5, None], 12, "room for 1 unused layers, more than 15% of the model's KV"),
        # A block has two places. The second layer with a window would be missing in two tables.
        ([(2, 2)] + [(1, 1)] * 2, [5, None, None], 12, "room for 1 unused layers, more than 15% of the model's KV"),
    ],
)
def test_layers_of_other_sizes_have_one_group(
    sizes: list[tuple[int, int]], windows: list[int | None], block_size: int, reason: str
) -> None:
    """Layers of each kind must have one size, and the larger must be a multiple of the smaller."""
    groups = _divide(sizes, windows, block_size=block_size)

    assert isinstance(groups, str)
    assert reason in groups


_BLOCK = 6
SHAPES = {
    "one size": (KVShape(2, 32), KVShape(2, 32)),
    "other heads": (KVShape(1, 64), KVShape(2, 32)),
    "smaller windows": (KVShape(1, 64, 128), KVShape(1, 32, 64)),
    "larger windows": (KVShape(1, 32), KVShape(3, 32)),
}
"""KV shapes of layers without and with a window."""


@pytest.mark.parametrize("dtype", [torch.float32, INT4], ids=["float32", "int4"])
@pytest.mark.parametrize("kind", SHAPES)
@torch.inference_mode()
def test_each_token_has_a_slot_of_its_own_in_each_layer(kind: str, dtype: torch.dtype) -> None:
    """KV that all layers of two rows write is read through their tables, even after whole blocks were copied."""
    shapes = [SHAPES[kind][layer % 5 != 2] for layer in range(10)]
    windows = [5 if layer % 5 != 2 else None for layer in range(10)]
    groups = _divide(layer_bytes(shapes, dtype), windows, block_size=_BLOCK)
    assert not isinstance(groups, str)
    num_rows, length = 2, 4
    pool = allocate([shapes[2]] * groups.num_places, 2 * num_rows * length * groups.num_groups, _BLOCK, dtype, CPU, "")
    numbers = torch.randperm(len(pool[0][0]), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    tables, others = numbers.view(2, groups.num_groups, num_rows, length)
    positions = np.tile(np.arange(length * _BLOCK), num_rows)
    rows = np.repeat(np.arange(num_rows), length * _BLOCK)
    blocks = tables.numpy()[:, rows, positions // _BLOCK].astype(np.int64)
    first = (blocks[0] * _BLOCK + positions % _BLOCK)[None]
    slots = np.concatenate((first, window_slots(groups, blocks[1:], positions % _BLOCK, _BLOCK)))
    caches = layer_caches(pool, shapes, groups)
    written = []
    for layer, shape in enumerate(shapes):
        kv = [torch.randn(len(positions), shape.num_kv_heads, width) for width in shape.widths]
        at = torch.from_numpy(slots[groups.table_numbers[layer]])
        write_kv_reference(kv[0], kv[1], *caches[layer], at)
        written.append(kv)

    whole = BlockPool([tensor for pair in pool for tensor in pair], CPU)
    copy_blocks(whole, whole, torch.stack((tables.flatten(), others.flatten())).long())
    for tensor in whole.tensors:
        tensor[tables.flatten().long()] = 0
    for layer, number in enumerate(groups.table_numbers):
        of_rows = others[0] if not number else window_tables(groups, others[1:])[number - 1]
        size = caches[layer][0].shape[2]
        at = of_rows[rows, positions // size].long() * size + torch.from_numpy(positions % size)
        for cache, expected in zip(caches[layer], written[layer], strict=True):
            largest = (read_kv(cache, at, torch.float32) - expected).abs().max()
            assert largest < (0.5 if dtype == INT4 else 1e-6)


def _admission(**changes: object) -> plan_pb2.Admission:
    tables = [to_column(range(10)), to_column([20, 21, 22, 23, 24, 25]), to_column([30, 31, 32, 33, 34, 35])]
    fields: dict[str, Any] = {"window_first": 2, "window_period": 5, "block_tables": tables, "num_computed_tokens": 16}
    return plan_pb2.Admission(
        row=1, generation=1, token_ids=to_column([1] * 40), num_prompt_tokens=40, **fields | changes
    )


def test_tables_for_windows_grow_and_repeat() -> None:
    """After its end, a table repeats with its period. An appended position gets new blocks, or repeats too."""
    rows = RowTable(LIMITS, torch.device("cpu"))
    rows.change(decode_plan(plan_pb2.Plan(step=1, admissions=[_admission()]), LIMITS))
    append = plan_pb2.Plan(
        step=2,
        append_rows=to_column([1, 1, 1]),
        append_blocks=to_column([10, 11, 12]),
        append_windows=to_column([-1, -1, 40, 41, -1, -1]),
    )
    rows.change(decode_plan(append, LIMITS))

    assert rows.tables.blocks(1)[0].tolist() == list(range(13))
    assert rows.tables.blocks(1)[1, 2:].tolist() == [20, 21, 22, 23, 24, 25, 21, 22, 23, 40, 25]
    assert rows.tables.blocks(1)[2, 2:].tolist() == [30, 31, 32, 33, 34, 35, 31, 32, 33, 41, 35]
    rows.check_chunks(np.array([1]), np.array([8]))
    with pytest.raises(PlanError, match="exceeds 8 tokens"):
        rows.check_chunks(np.array([1]), np.array([9]))


def test_a_position_without_window_blocks_is_refused() -> None:
    """Before a row has a whole period, each appended position needs window blocks."""
    rows = RowTable(LIMITS, torch.device("cpu"))
    tables = [to_column(range(10)), to_column([20, 21, 22, 23]), to_column([30, 31, 32, 33])]
    admission = _admission(window_first=2, block_tables=[to_column(range(6)), *tables[1:]])
    rows.change(decode_plan(plan_pb2.Plan(step=1, admissions=[admission]), LIMITS))
    append = plan_pb2.Plan(step=2, append_rows=to_column([1]), append_blocks=to_column([10]))
    with pytest.raises(PlanError, match="has no block"):
        rows.change(decode_plan(append, LIMITS))


@pytest.mark.parametrize("windows", [[40, -1], [-1, 40]])
def test_a_position_has_new_blocks_in_all_tables_for_windows(windows: list[int]) -> None:
    """A table with block -1 would let attention read outside of the cache."""
    append = plan_pb2.Plan(append_rows=to_column([1]), append_blocks=to_column([10]), append_windows=to_column(windows))
    with pytest.raises(PlanError, match="in some tables for windows only"):
        decode_plan(append, LIMITS)


def test_more_positions_than_a_table_has_are_refused() -> None:
    """The plan violates the protocol, even if it has new blocks for each position."""
    rows = RowTable(LIMITS, torch.device("cpu"))
    rows.change(decode_plan(plan_pb2.Plan(step=1, admissions=[_admission()]), LIMITS))
    count = 2 * LIMITS.max_blocks_per_row
    append = plan_pb2.Plan(
        step=2,
        append_rows=to_column([1] * count),
        append_blocks=to_column([10] * count),
        append_windows=to_column([40, 41] * count),
    )
    with pytest.raises(PlanError, match="a row exceeds 21 blocks"):
        rows.change(decode_plan(append, LIMITS))


def test_positions_that_all_repeat_need_no_blocks() -> None:
    """A plan may say of every position that it reuses the blocks of a period earlier."""
    append = plan_pb2.Plan(
        append_rows=to_column([1]), append_blocks=to_column([10]), append_windows=to_column([-1, -1])
    )
    assert decode_plan(append, LIMITS).append_windows.tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_first": 3}, "begin behind the window"),
        ({"block_tables": [to_column(range(10)), b"", b""]}, "end at block 2 of 10"),
        ({"block_tables": [to_column(range(7)), *[to_column(range(20, 26))] * 2]}, "end at block 8 of 7"),
        ({"block_tables": [to_column(range(10)), to_column([20]), to_column([30, 31])]}, "differ in length"),
        ({"block_tables": [to_column(range(10)), to_column([20])]}, "2 block tables do not match 3 KV groups"),
        ({"block_tables": [to_column(range(10)), to_column([50]), to_column([30])]}, "a block ID is outside"),
        ({"window_period": 3}, "does not hold 13 tokens"),
        ({"window_period": 1 << 31}, "does not hold 13 tokens"),
    ],
)
def test_invalid_tables_are_refused(changes: dict[str, object], message: str) -> None:
    """Tables that would let a step read or write other blocks than the row's violate the protocol."""
    with pytest.raises(PlanError, match=message):
        decode_plan(plan_pb2.Plan(step=1, admissions=[_admission(**changes)]), LIMITS)


_WIDE: dict[str, Any] = GEMMA_4["E2B"] | {"head_dim": 32, "global_head_dim": 64}


@pytest.mark.parametrize(
    ("architecture", "fields", "settings", "reason"),
    [
        ("Gemma3ForCausalLM", {}, {}, ""),
        ("Gemma3ForCausalLM", {}, {"host_cache": "1MiB"}, ""),
        (
            *("Gemma3ForCausalLM", {}, {"host_cache": "1MiB", "disk_cache": "disk"}),
            "not supported with disk_cache; to free it, turn off disk_cache",
        ),
        (
            *("Gemma3ForCausalLM", {}, {"speculation": "draft"}),
            "not supported with draft_model; to free it, turn off draft_model",
        ),
        (
            *("Gemma3ForCausalLM", {}, {"max_model_len": 400}),
            "no sequence exceeds the window and a chunk (16 + 384 tokens); see",
        ),
        (
            *("Gemma3ForCausalLM", {"layer_types": ["sliding_attention", *["full_attention"] * 2]}, {}),
            "blocks would have room for 1 unused layers, more than 15%",
        ),
        ("Gemma4ForCausalLM", _WIDE, {}, ""),
        ("Gemma4ForCausalLM", _WIDE, {"kv_cache_dtype": "int4"}, ""),
        (
            *("Gemma4ForCausalLM", _WIDE, {"kv_cache_dtype": "int8"}),
            "not supported with kv_cache_dtype int8; to free it, use auto",
        ),
        (
            *("Gemma4ForCausalLM", GEMMA_4["31B"], {"block_size": 5}),
            "a block of 5 tokens cannot be divided by 2, the ratio of the layers' sizes; see",
        ),
    ],
)
def test_a_worker_says_whether_it_frees_windows(
    architecture: str, fields: dict[str, Any], settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """One line says why KV behind windows is kept, and what to do."""
    folder = make_checkpoint(
        architecture, tmp_path / "model", sliding_window=16, max_position_embeddings=2048, **fields
    )
    if "speculation" in settings:
        settings = settings | {"draft_model": str(folder)}
    if "disk_cache" in settings:
        settings = settings | {"disk_cache": str(tmp_path / "disk"), "disk_cache_bytes": "8MiB"}
    with capture_logs() as logs:
        engine = make_engine(folder, kv_cache_memory="6MiB", **settings)

    (line,) = [each["event"] for each in logs if "behind sliding windows" in each["event"]]
    assert (engine.limits.num_kv_groups > 1) == (not reason)
    assert (f"is kept: {reason}" if reason else "is freed") in line


@pytest.mark.parametrize(("architecture", "has_windows"), [("Llama4ForCausalLM", True), ("FalconForCausalLM", False)])
def test_a_worker_says_that_the_cache_interface_keeps_windows(
    architecture: str, has_windows: bool, tmp_path: Path
) -> None:
    """A model with windows that runs through the cache interface has one line about them, and other models none."""
    with capture_logs() as logs:
        engine = make_engine(make_checkpoint(architecture, tmp_path), kv_cache_memory="6MiB")

    lines = [each["event"] for each in logs if "behind sliding windows" in each["event"]]
    assert engine.limits.num_kv_groups == 1
    assert len(lines) == has_windows
    assert all(f"is kept: {architecture} runs through the cache interface; see" in line for line in lines)


LEVELS = ["off", *(kernels.level_name for kernels in native_levels())]
_SLIDES = ["full_attention", "sliding_attention", "sliding_attention"]
_SIX: dict[str, Any] = {"num_hidden_layers": 6}
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "Ministral": ("MinistralForCausalLM", _SIX | {"layer_types": _SLIDES * 2}),
    "Qwen2": (
        "Qwen2ForCausalLM",
        _SIX
        | {"use_sliding_window": True, "sliding_window": 16}
        | {"layer_types": ["full_attention"] * 2 + _SLIDES[1:] * 2},
    ),
    "Mistral": ("MistralForCausalLM", _SIX),
    "Phi-3": ("Phi3ForCausalLM", _SIX | {"sliding_window": 16}),
} | {f"Gemma 4 {name}": ("Gemma4ForCausalLM", fields) for name, fields in GEMMA_4.items()}
"""Classes and fields of configurations. Own code runs the first three; Mistral and Phi-3 have a window in every layer.
"""


@pytest.fixture(scope="module", params=WINDOWED)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    """Return a checkpoint with windows, and the reference for its tokens."""
    architecture, fields = WINDOWED[request.param]
    folder = make_checkpoint(architecture, tmp_path_factory.mktemp("model"), **fields)
    return folder, Oracle(folder)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_rows_use_window_blocks_again(windowed: tuple[Path, Oracle], level: str, speculation: str) -> None:
    """Tokens behind a window that was freed are those of `transformers`, with random chunks and with drafts."""
    folder, oracle = windowed
    with cpu_kernels(level):
        engine = make_engine(
            folder, block_size=8, max_num_seqs=4, max_num_batched_tokens=96, speculation=speculation, dtype="float32"
        )
        driver = Driver(engine, seed=1)
        prompts = [driver.rng.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 33, 130, 480, 600)]
        if speculation != "off":
            known = [[*prompt, *oracle.generate(prompt, OUTPUT_LENGTH + 4)] for prompt in prompts]
            guess(engine, known, seed=2, wrong=0.25)
        answers, events = generate_all(driver, prompts, draft_limit=0 if speculation == "off" else 4)

    assert engine.limits.num_kv_groups > 1
    assert speculation == "ngram" or all(events.values()), f"the schedule was too tame: {events}"
    assert (driver.num_drafted > driver.num_accepted > 0) == (speculation == "ngram")
    verdict = Verdict()
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.judge(prompt, answer, verdict)
    assert verdict.near_ties * 1000 <= verdict.num_tokens, f"{verdict.near_ties} near ties"
