"""Layers of `transformers` with recurrent state use the native kernels while a step is computed, and only then."""

import logging
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.utils import logging as transformers_logging

from checks.driver import CPU, Driver, make_engine
from kernels.native.library import Native, native_levels
from measure.testbed.checkpoints import make_checkpoint
from shared.config import WorkerConfig
from tests.cpu_kernels import cpu_kernels
from tests.worker_svc.oracle import Oracle, Verdict
from worker_svc.model import hf_recurrent, hf_trial
from worker_svc.model.hf_recurrent import NativeLayers
from worker_svc.model.loader import load_model
from worker_svc.model.recurrent import StateCounts

PROMPT = list(range(40, 110))
COUNT = 12
FUNCTIONS = ("causal_conv1d_update", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
LEVELS = pytest.mark.parametrize("level", [kernels.level_name for kernels in native_levels()])


@pytest.fixture(scope="module", params=["Lfm2ForCausalLM", "Qwen3NextForCausalLM", "Mamba2ForCausalLM"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with convolutions only, one with the gated delta rule, and one with another recurrence."""
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    """Return the reference for its tokens."""
    return Oracle(checkpoint)


@pytest.mark.parametrize(
    ("architecture", "level", "functions"),
    [
        *(
            (name, LEVELS.args[1][0], set())
            for name in ("Lfm2ForCausalLM", "Qwen3NextForCausalLM", "Mamba2ForCausalLM")
        ),
        ("MambaForCausalLM", LEVELS.args[1][0], {"selective_scan_fn", "selective_state_update"}),
        ("Qwen3NextForCausalLM", "off", {"causal_conv1d_fn", "chunk_gated_delta_rule"}),
    ],
)
def test_only_functions_without_a_native_kernel_are_reported(
    architecture: str, level: str, functions: set[str], tmp_path: Path
) -> None:
    """`transformers` warns about a function that runs in torch. Its trial at load does not count if steps do not."""
    checkpoint = make_checkpoint(architecture, tmp_path)
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    transformers_logging.warning_once.cache_clear()  # Each warning is logged once per process.
    handler = BufferingHandler(1000)
    logger.addHandler(handler)
    try:
        with cpu_kernels(level):
            make_engine(checkpoint)
        logger.warning_once("another warning")  # type: ignore[attr-defined]
    finally:
        logger.removeHandler(handler)

    *warnings, last = [each.getMessage() for each in handler.buffer]
    found = {warning.split("`")[1] for warning in warnings}
    assert found >= functions
    assert bool(found) == bool(functions)
    assert last == "another warning"


@LEVELS
def test_tokens_equal_those_of_transformers(checkpoint: Path, oracle: Oracle, level: str) -> None:
    """Rows in prefill and decode, with each level of the kernels."""
    with cpu_kernels(level):
        driver = Driver(make_engine(checkpoint, max_num_seqs=3, max_num_batched_tokens=128))
    rows = {driver.admit(prompt): prompt for prompt in (PROMPT, PROMPT[:9], PROMPT[5:40])}
    length = 3
    while any(len(driver.rows[row].tokens) < len(prompt) + COUNT for row, prompt in rows.items()):
        for row in rows:
            state = driver.rows[row]
            if state.in_prefill:
                driver.chunk(row, min(length, state.num_known - state.computed))
                length = length % 11 + 4
        driver.step()

    for row, prompt in rows.items():
        verdict = Verdict()
        oracle.judge(prompt, driver.rows[row].tokens[len(prompt) :][:COUNT], verdict)
        assert (verdict.num_tokens, verdict.near_ties) == (COUNT, 0)


@LEVELS
def test_logits_in_bfloat16_equal_those_of_torch(checkpoint: Path, level: str) -> None:
    """The trial's rows, with weights and activations in bfloat16; the kernels round as often as torch."""
    config = WorkerConfig(model=str(checkpoint), device="cpu", dtype="bfloat16")
    logits = []
    for kernels in ("off", level):
        with cpu_kernels(kernels):
            model, _ = load_model(config, CPU)
        model.allocate_states(StateCounts(3))
        tokens = torch.arange(1, 33).view(2, 16)
        positions = torch.arange(16).expand(2, 16)
        with torch.inference_mode():
            logits.append(hf_trial._paged_logits(model, tokens, positions, CPU).float())

    assert float((logits[0] - logits[1]).abs().max()) <= 0.05 * float(logits[0].abs().max())


def _decoder(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def test_functions_are_replaced_only_inside(tmp_path: Path) -> None:
    """The module has its own functions again afterwards, even after an error."""
    decoder = _decoder(make_checkpoint("Qwen3NextForCausalLM", tmp_path))
    own = [getattr(qwen3_next, name) for name in FUNCTIONS]
    layers = NativeLayers(decoder, native_levels()[0])

    inside: list[object] = []

    def fail() -> None:
        with layers:
            inside.extend(getattr(qwen3_next, name) for name in FUNCTIONS)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()

    assert all(one is not other for one, other in zip(inside, own, strict=True))
    assert [getattr(qwen3_next, name) for name in FUNCTIONS] == own


def test_steps_call_the_native_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and decode steps call the kernels in each layer, and with "off" none is called."""
    called: list[str] = []
    for name in ("delta_rule_native", "convolve_native", "convolve_tokens_native"):
        right = getattr(hf_recurrent, name)

        def counted(*arguments: object, name: str = name, right=right, **settings: object) -> torch.Tensor:  # type: ignore[no-untyped-def]
            called.append(name)
            return right(*arguments, **settings)  # type: ignore[no-any-return]

        monkeypatch.setattr(hf_recurrent, name, counted)
    checkpoint = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    with cpu_kernels("portable"):
        driver = Driver(make_engine(checkpoint))
    called.clear()
    row = driver.admit(PROMPT)
    driver.chunk(row, len(PROMPT))
    driver.step()
    prompt = list(called)
    called.clear()
    driver.step()
    decode = list(called)
    with cpu_kernels("off"):
        driver = Driver(make_engine(checkpoint))
    called.clear()
    driver.generate(PROMPT, 3)

    assert prompt == ["convolve_tokens_native", "delta_rule_native"] * 2
    assert decode == ["convolve_native", "delta_rule_native"] * 2
    assert called == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_are_computed_by_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """Arguments that the kernels do not support give exactly the result of the replaced function."""
    kernels: Native = native_levels()[0]
    layers = NativeLayers(_decoder(make_checkpoint("Qwen3NextForCausalLM", tmp_path)), kernels)
    query, key, value = torch.randn(3, 2, 1, 2, 16).to(dtype)
    gate, beta = -torch.rand(2, 1, 2), torch.rand(2, 1, 2).to(dtype)
    state = torch.randn(2, 2, 16, 16)
    x, past, weight = torch.randn(2, 8, 1).to(dtype), torch.randn(2, 8, 4).to(dtype), torch.randn(8, 4).to(dtype)

    results = []
    for context in (layers, None):
        if context is not None:
            context.__enter__()
        try:
            rule = qwen3_next.torch_recurrent_gated_delta_rule(
                query, key, value, gate, beta, initial_state=state.clone(), output_final_state=True
            )
            results.append((*rule, qwen3_next.causal_conv1d_update(x, past.clone(), weight, None, "silu")))
        finally:
            if context is not None:
                context.__exit__()

    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
