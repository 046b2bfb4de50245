"""Models packed for the CPU kernels compute what torch computes; quantised weights and KV cost little."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checks.driver import CPU, Driver, make_engine
from kernels.kv_quantised import DTYPES, INT4, parts_of, quantise_heads
from kernels.linear import PackedLinear, quantise
from kernels.native.library import Native, native_levels
from kernels.native.serving import native
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from shared.config import ConfigError, WorkerConfig
from tests.cpu_kernels import cpu_kernels
from worker_svc.memory.kv_pool import allocate
from worker_svc.model import hf_packed
from worker_svc.model.base import AttentionInputs, Model
from worker_svc.model.families import ARCHITECTURES
from worker_svc.model.loader import load_model

LEVELS = [kernels.level_name for kernels in native_levels()]
_TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LENGTHS = (1, 37, 3, 90, 2)
"""Number of tokens in each compared row; the first rows decode."""
BLOCK_SIZE = 16

pytestmark = pytest.mark.skipif(not LEVELS, reason="built without a compiler: torch computes")
quantises = pytest.mark.skipif(native() is None, reason="the CPU kernels, which quantise at load, do not serve here")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def load(folder: Path | str, **settings: Any) -> Model:
    """Load a model."""
    return load_model(WorkerConfig(model=str(folder), device="cpu", **settings), CPU)[0]


def logits_of(
    model: Model, tokens: list[list[int]], dtype: torch.dtype, index: torch.Tensor | None = None
) -> torch.Tensor:
    """Return some tokens' logits (default all) for rows computed at once from scratch: `[tokens, vocab]` float64."""
    lengths = torch.tensor([len(row) for row in tokens])
    blocks = -(-lengths // BLOCK_SIZE)
    first = torch.cat((torch.zeros(1, dtype=torch.int64), blocks.cumsum(0)[:-1]))
    tables = first[:, None] + torch.arange(int(blocks.max())).minimum(blocks[:, None] - 1)
    positions = torch.cat([torch.arange(len(row)) for row in tokens])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    caches = allocate(model.kv_shapes, int(blocks.sum()), BLOCK_SIZE, dtype, CPU, "test")
    attention = AttentionInputs(
        slot_mapping=first.repeat_interleave(lengths) * BLOCK_SIZE + positions,
        block_tables=tables.int(),
        query_start=starts.int(),
        context_lens=lengths.int(),
        max_query_len=int(lengths.max()),
    )
    ids = torch.tensor([token for row in tokens for token in row])
    return model.forward(ids, positions, attention, caches, index).double()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_model_computes_what_torch_does(architecture: str, level: str, tmp_path: Path) -> None:
    """Biases, norms of queries and keys, windows, experts, tied and untied embeddings: equal logits at every level.

    In bfloat16 only half of the tokens must agree, because rounding may choose another expert for a few.
    """
    folder = make_checkpoint(architecture, tmp_path)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.05)):
        with cpu_kernels("off"):
            expected = logits_of(load(folder, dtype="float32"), tokens, torch.float32)
        with cpu_kernels(level):
            got = logits_of(load(folder, dtype=dtype), tokens, getattr(torch, dtype))

        distances = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(distances.max() if dtype == "float32" else distances.median()) < tolerance, dtype


@pytest.mark.parametrize("chosen", [[], [0], [132, 0, 132, 40]])
def test_only_the_logits_asked_for_are_computed(chosen: list[int], tmp_path: Path) -> None:
    """The logits of any selected tokens, in any order, equal those computed for all tokens.

    The CPU kernels compute a row identically in every batch; torch's products may sum in another order.
    """
    model = load(make_checkpoint("LlamaForCausalLM", tmp_path))
    tokens = [list(range(5, 5 + length)) for length in LENGTHS]
    all_of_them = logits_of(model, tokens, torch.float32)
    rounding = 0.0 if native() is not None else 64 * torch.finfo(torch.float32).eps

    found = logits_of(model, tokens, torch.float32, torch.tensor(chosen, dtype=torch.int64))

    torch.testing.assert_close(found, all_of_them[chosen], rtol=0, atol=rounding * float(all_of_them.abs().amax()))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("quantization", "least_same", "most_lost"), [("int8", 0.93, 0.03), ("int4", 0.82, 0.08)])
def test_quantised_weights_keep_the_embedded_models_answers(
    quantization: str, least_same: float, most_lost: float, level: str
) -> None:
    """On a trained model's own text, they choose the same token nearly always, and the text stays as likely."""
    prompts = [[1, 40 + row, 50, 60] for row in range(6)]
    with cpu_kernels(level):
        driver = Driver(make_engine("demo"))  # type: ignore[arg-type]
        texts = [prompt + driver.generate(prompt, 40) for prompt in prompts]
        dtype = load_model(WorkerConfig(model="demo", device="cpu"), CPU)[1].dtype
        exact, rounded = (
            logits_of(load("demo", quantization=quantization), texts, dtype).log_softmax(-1)
            for quantization in ("none", quantization)
        )
    targets = torch.tensor([token for text in texts for token in [*text[1:], 0]])
    written = torch.tensor([3 <= place < len(text) - 1 for text in texts for place in range(len(text))])
    lost = (exact - rounded).gather(1, targets[:, None])[written]
    same = (exact.argmax(-1) == rounded.argmax(-1))[written]

    assert float(same.double().mean()) > least_same
    assert abs(float(lost.mean())) < most_lost, "nats per token"


@pytest.mark.parametrize(
    ("dtype", "least_same", "most_apart"),
    [(torch.int8, 0.97, 1e-3), (torch.uint8, 0.9, 1e-2), (INT4, 0.8, 0.1)],
    ids=["int8", "fp8", "int4"],
)
@pytest.mark.parametrize("level", LEVELS)
def test_quantised_kv_keeps_the_embedded_models_answers(
    level: str, dtype: torch.dtype, least_same: float, most_apart: float
) -> None:
    """On a trained model's own text, chunks over a small cache choose the same tokens, and the text stays as likely."""
    prompts = [[1, 40 + row, 50, 60] for row in range(6)]
    with cpu_kernels(level):
        driver = Driver(make_engine("demo"))  # type: ignore[arg-type]
        texts = [prompt + driver.generate(prompt, 40) for prompt in prompts]
        exact, rounded = (logits_of(load("demo"), texts, each).log_softmax(-1) for each in (torch.float32, dtype))
    divergence = (exact.exp() * (exact - rounded)).sum(-1)

    assert float((exact.argmax(-1) == rounded.argmax(-1)).double().mean()) > least_same
    assert float(divergence.mean()) < most_apart, "nats per token"


def test_quantised_experts_are_near_the_exact_ones(tmp_path: Path) -> None:
    """Logits with int8 experts are near; all experts are chosen, because rounding may change a choice."""
    folder = make_checkpoint(
        "Qwen2MoeForCausalLM", tmp_path, num_experts_per_tok=6, num_hidden_layers=1, mlp_only_layers=[]
    )
    tokens = [list(range(5, 5 + length)) for length in LENGTHS]
    with cpu_kernels(LEVELS[-1]):
        exact, rounded = (
            logits_of(load(folder, quantization=chosen), tokens, torch.float32) for chosen in ("none", "int8")
        )

    assert 0 < float(((rounded - exact).norm(dim=-1) / exact.norm(dim=-1)).max()) < 0.1


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.05), ("int4", 0.3)])
@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM"])
def test_decoders_of_transformers_are_quantised_too(
    architecture: str, quantization: str, most: float, tmp_path: Path
) -> None:
    """Their linear layers, including GPT-2's transposed ones, cost as much as those of Quire's own code."""
    folder = make_checkpoint(architecture, tmp_path, std=0.05)
    tokens = [list(range(5, 5 + length)) for length in LENGTHS]
    with cpu_kernels(LEVELS[-1]):
        exact = logits_of(load(folder, dtype="float32"), tokens, torch.float32)
        found = logits_of(load(folder, dtype="float32", quantization=quantization), tokens, torch.float32)

    assert 0 < float((found - exact).norm() / exact.norm()) < most


@pytest.mark.parametrize(
    ("architecture", "num_kept"),
    [("Gemma3ForCausalLM", 0), ("FalconForCausalLM", 0), ("Qwen3NextForCausalLM", 0), ("MambaForCausalLM", 1)],
)
@pytest.mark.parametrize("tied", [False, True])
def test_decoders_of_transformers_compute_bfloat16_products_with_packed_weights(
    architecture: str, num_kept: int, tied: bool, tmp_path: Path
) -> None:
    """Logits are near those of torch; a layer whose class uses the weight stays, and a tied embedding has no copy."""
    folder = make_checkpoint(architecture, tmp_path, tie_word_embeddings=tied)
    tokens = [list(range(5, 5 + length)) for length in LENGTHS[:3]]
    with cpu_kernels("off"):
        exact = logits_of(load(folder, dtype="bfloat16"), tokens, torch.bfloat16)
    with cpu_kernels(LEVELS[-1]):
        model: Any = load(folder, dtype="bfloat16")
        found = logits_of(model, tokens, torch.bfloat16)

    linears = [module for module in model._decoder.modules() if type(module) is torch.nn.Linear]
    packed = [module for module in model._decoder.modules() if isinstance(module, hf_packed.PackedModule)]
    assert packed
    unused = {"router", "gate", "shared_expert_gate"}
    names = {name.split(".")[-1] for name, module in model._decoder.named_modules() if module in linears}
    assert len(names - unused) == num_kept, names
    embedding = model._decoder.get_input_embeddings()
    assert isinstance(embedding.weight, torch.Tensor) is not tied
    assert float((found - exact).float().norm() / exact.float().norm()) < 0.05


_MIXTURES = {
    "HunYuanMoEV1ForCausalLM": transformers.HunYuanMoEV1Config(
        **_TINY, num_experts=4, moe_topk=2, num_key_value_heads=2, head_dim=16, intermediate_size=64
    ),
    "JetMoeForCausalLM": transformers.JetMoeConfig(
        **_TINY, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, kv_channels=16
    ),
}


def mixture(architecture: str, folder: Path) -> Path:
    """A folder with config.json of a mixture that names its routers as no other class does."""
    config = _MIXTURES[architecture]
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


@quantises
@pytest.mark.parametrize("architecture", _MIXTURES)
def test_routers_of_transformers_are_not_quantised(
    architecture: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Layers below a module named as a router keep their type: no product has as many outputs as experts."""
    outputs: list[int] = []

    def record(weight: torch.Tensor, bias: torch.Tensor | None, *, kernels: Native) -> PackedLinear:
        outputs.append(len(weight))
        return quantise(weight, bias, kernels=kernels)

    monkeypatch.setattr(hf_packed, "quantise", record)
    load(mixture(architecture, tmp_path), dtype="float32", quantization="int8", load_format="random")

    assert outputs
    assert 4 not in outputs


@quantises
def test_a_class_that_cannot_compute_with_packed_weights_is_refused_at_load(tmp_path: Path) -> None:
    """The decoder computes a step after its layers were replaced; Mamba computes with a layer's weight itself."""
    message = (
        r"^quantization: int8 is not supported for MambaForCausalLM: its forward pass fails"
        r" \(TypeError: .+_Weight.+\); use none$"
    )
    with pytest.raises(ConfigError, match=message):
        load(make_checkpoint("MambaForCausalLM", tmp_path), quantization="int8")


@quantises
def test_a_class_that_reads_the_type_of_a_weight_is_quantised(tmp_path: Path) -> None:
    """Mamba 2 converts the inputs of its LM head to the type of the weight."""
    model: Any = load(make_checkpoint("Mamba2ForCausalLM", tmp_path), dtype="float32", quantization="int8")

    assert isinstance(model._decoder.lm_head, hf_packed.PackedModule)


def test_fp8_weights_are_not_made_on_a_cpu(tmp_path: Path) -> None:
    """The message says why, and what to use."""
    with pytest.raises(ConfigError, match=r"quantization: fp8 needs a GPU.*; use int8 or none"):
        load(make_checkpoint("LlamaForCausalLM", tmp_path), quantization="fp8")


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_serve(quantization: str, architecture: str, tmp_path: Path) -> None:
    """An engine with quantised weights generates, prompts in chunks included, the same as it does alone."""
    folder = make_checkpoint(architecture, tmp_path)
    with cpu_kernels(LEVELS[-1]):
        driver = Driver(make_engine(folder, quantization=quantization))
    prompt = driver.rng.integers(0, VOCAB_SIZE, 50).tolist()

    assert driver.generate(prompt, 12) == driver.generate(prompt, 12)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    ("architecture", "sizes", "settings", "reason"),
    [
        ("GPT2LMHeadModel", {}, {"dtype": "float16"}, "they support float32 and bfloat16, not float16"),
        ("LlamaForCausalLM", {}, {"dtype": "float16"}, "weights of type float32, bfloat16, not float16"),
        ("LlamaForCausalLM", {"head_dim": 24}, {}, "head_dim to be a multiple of 16, not 24"),
    ],
)
def test_quantization_is_refused_where_it_is_not_to_be_had(
    architecture: str, sizes: dict[str, int], settings: dict[str, str], reason: str, quantization: str, tmp_path: Path
) -> None:
    """Other models, and types and sizes that the CPU kernels do not know, are refused by the setting's name and why."""
    with pytest.raises(ConfigError, match=f"quantization: {quantization} .*{reason}"):
        load(make_checkpoint(architecture, tmp_path, **sizes), quantization=quantization, **settings)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_torch_reads_quantised_kv_as_the_kernels_do(architecture: str, kind: str, tmp_path: Path) -> None:
    """Without the CPU kernels, and for decoders of transformers, a quantised cache costs as little."""
    folder = make_checkpoint(architecture, tmp_path, head_dim=32)
    tokens = [list(range(5, 5 + length)) for length in LENGTHS]
    exact = logits_of(load(folder), tokens, torch.float32)
    with cpu_kernels("off"):
        found = logits_of(load(folder, kv_cache_dtype=kind), tokens, DTYPES[kind])

    assert 0 < float((found - exact).norm() / exact.norm()) < {"int8": 0.03, "fp8": 0.1, "int4": 0.35}[kind]


@pytest.mark.parametrize("level", LEVELS)
def test_the_kernels_write_int4_as_the_reference_does(level: str) -> None:
    """In the first layer, codes, scales and zeros are those of `quantise_heads` for its keys and values in float32."""
    with cpu_kernels(level):
        model = load("demo", dtype="float32")
        exact, rounded = (
            allocate(model.kv_shapes, 4, BLOCK_SIZE, dtype, CPU, "test")[0] for dtype in (torch.float32, INT4)
        )
        places = torch.arange(50)
        attention = AttentionInputs(
            slot_mapping=places,
            block_tables=torch.arange(4).int()[None],
            query_start=torch.tensor([0, 50]).int(),
            context_lens=torch.tensor([50]).int(),
            max_query_len=50,
        )
        for dtype, caches in ((torch.float32, exact), (INT4, rounded)):
            others = allocate(model.kv_shapes, 4, BLOCK_SIZE, dtype, CPU, "test")[1:]
            model.forward(places + 9, places, attention, (caches, *others), None)

    for wide, narrow in zip(exact, rounded, strict=True):
        for found, expected in zip(parts_of(narrow), quantise_heads(wide, INT4), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "head_dim", "multiple", "instead"),
    [("fp8", 18, 4, "auto"), ("int4", 18, 32, "auto"), ("int4", 48, 32, "int8 or auto")],
)
def test_heads_of_any_size_are_refused_in_quantised_kv(
    kind: str, head_dim: int, multiple: int, instead: str, tmp_path: Path
) -> None:
    """A block's scales begin at a multiple of four bytes; in int4, each group of 32 elements has one."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path, head_dim=head_dim)
    reason = f"needs heads whose size is a multiple of {multiple}, not {head_dim}; use {instead}$"
    with pytest.raises(ConfigError, match=f"kv_cache_dtype: {kind} {reason}"):
        load(folder, kv_cache_dtype=kind)


def test_torch_computes_where_the_kernels_are_off(tmp_path: Path) -> None:
    """`QUIRE_CPU_KERNELS=off` serves as an installation without a compiler does; int8 is refused then."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    with cpu_kernels("off"):
        assert len(Driver(make_engine(folder)).generate([1, 2, 3], 4)) == 4
        with pytest.raises(ConfigError, match=r"quantization: .*QUIRE_CPU_KERNELS"):
            load(folder, quantization="int8")
