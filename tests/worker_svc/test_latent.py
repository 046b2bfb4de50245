"""Latent attention of `transformers` decoders: what is stored and read, and chunks that expand latent vectors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checks.driver import CPU, make_engine
from kernels import latent_attention as kernel
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.storages import bytes_of
from shared.config import WorkerConfig
from worker_svc.model import hf_latent
from worker_svc.model.base import AttentionInputs, KVCache
from worker_svc.model.hf_interface import InterfaceModel
from worker_svc.model.loader import load_model

BLOCK_SIZE = 8
RANK, ROTARY_DIM, LAYERS = 64, 16, 2  # of the checkpoint
CONTEXTS = (5, 37, 64)


@pytest.fixture
def model(tmp_path: Path) -> InterfaceModel:
    """Return a tiny DeepSeek V3 in float32."""
    folder = make_checkpoint("DeepseekV3ForCausalLM", tmp_path)
    found, _ = load_model(WorkerConfig(model=str(folder), device="cpu", dtype="float32"), CPU)
    assert isinstance(found, InterfaceModel)
    return found


def pool(model: InterfaceModel) -> list[KVCache]:
    """Return random latent vectors and rotary keys for rows with the given contexts."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(64, shape.num_kv_heads, BLOCK_SIZE, shape.widths[0], generator=generator),
            torch.randn(64, shape.num_kv_heads, BLOCK_SIZE, shape.widths[1], generator=generator),
        )
        for shape in model.kv_shapes
    ]


def step(model: InterfaceModel, caches: list[KVCache], lengths: tuple[int, ...]) -> torch.Tensor:
    """Compute the last `lengths` tokens of rows with `CONTEXTS`; return the logits of all tokens."""
    tables = torch.arange(len(CONTEXTS) * 8, dtype=torch.int32).view(len(CONTEXTS), 8)
    positions = [torch.arange(end - length, end) for end, length in zip(CONTEXTS, lengths, strict=True)]
    slots = [
        tables[row].long()[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for row, place in enumerate(positions)
    ]
    attention = AttentionInputs(
        slot_mapping=torch.cat(slots),
        block_tables=tables,
        query_start=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        context_lens=torch.tensor(CONTEXTS, dtype=torch.int32),
        max_query_len=max(lengths),
    )
    places = torch.cat(positions)
    with torch.inference_mode():
        return model.forward(places + 1, places, attention, caches, None)


class ReadBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that torch operations read from the storages of some tensors."""

    def __init__(self, caches: list[KVCache]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {each.untyped_storage().data_ptr() for cache in caches for each in cache}
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = any(
            isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() in self._storages
            for each in tree_leaves((args, kwargs))
        )
        for each in tree_leaves(result):
            if read and each.untyped_storage().data_ptr() not in self._storages:  # no view, and no write in place
                self.bytes += each.nbytes
        return result


def test_a_token_stores_a_latent_vector_and_a_rotary_key(tmp_path: Path) -> None:
    """The bytes of the pool are those of one latent vector and one rotary key per token and layer."""
    folder = make_checkpoint("DeepseekV3ForCausalLM", tmp_path)
    engine = make_engine(folder, block_size=BLOCK_SIZE, dtype="bfloat16", kv_cache_memory="1MiB")
    tokens = engine.limits.num_blocks * BLOCK_SIZE

    assert bytes_of(vars(engine)["_caches"]) == tokens * LAYERS * (RANK + ROTARY_DIM) * 2


def test_decode_reads_latent_vectors_only(model: InterfaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode with torch reads each row's latent vectors and rotary keys once per layer, and expands none of them."""
    caches = pool(model)
    expected = step(model, caches, (1, 1, 1))
    monkeypatch.setattr(kernel, "native", lambda: None)
    expanded: list[torch.Tensor] = []
    monkeypatch.setattr(hf_latent.LatentLayer, "_attend_expanded", lambda *args: expanded.append(args[1]))

    with ReadBytes(caches) as read:
        logits = step(model, caches, (1, 1, 1))

    assert read.bytes == sum(CONTEXTS) * LAYERS * (RANK + ROTARY_DIM) * 4
    assert not expanded
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [(5, 37, 64), (1, 20, 1), (5, 1, 40)])
def test_expanded_chunks_equal_absorbed_ones(
    model: InterfaceModel, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks have the same logits whether or not their rows are expanded, also in a batch with decode rows."""
    logits = []
    for wanted in (True, False):
        monkeypatch.setattr(hf_latent, "expands", lambda tokens, *_, wanted=wanted: wanted and tokens > 1)
        logits.append(step(model, pool(model), lengths))

    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_expanded_chunks_and_decode_use_the_same_quantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With int4 weights, a chunk has nearly the same logits whether or not its row is expanded."""
    folder = make_checkpoint("DeepseekV3ForCausalLM", tmp_path)
    config = WorkerConfig(model=str(folder), device="cpu", dtype="float32", quantization="int4")
    model, _ = load_model(config, CPU)
    assert isinstance(model, InterfaceModel)
    logits = []
    for wanted in (True, False):
        monkeypatch.setattr(hf_latent, "expands", lambda tokens, *_, wanted=wanted: wanted and tokens > 1)
        logits.append(step(model, pool(model), CONTEXTS))

    distances = (logits[0] - logits[1]).norm(dim=-1) / logits[1].norm(dim=-1)
    assert distances.median() < 0.1  # 0.2 if only one of them has quantised weights


def test_long_chunks_are_expanded_and_others_are_not() -> None:
    """Sizes of DeepSeek V3: prompts are expanded, drafts and tokens in decode are not, nor are very long rows."""
    sizes = {"num_heads": 16, "rank": 512, "rotary_dim": 64, "query_dim": 192, "value_dim": 128}
    assert hf_latent.expands(512, 512, **sizes)
    assert hf_latent.expands(512, 4096, **sizes)
    assert not hf_latent.expands(8, 4096, **sizes)
    assert not hf_latent.expands(1, 1, **sizes)
    assert not hf_latent.expands(512, 1 << 20, **sizes)
