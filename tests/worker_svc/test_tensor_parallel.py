"""A group of ranks computes and samples the same as one process."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checks.driver import Driver, make_engine
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from measure.testbed.quantised_checkpoints import make_pair
from protos.quire.plan.v1 import plan_pb2
from services.streams.logprobs import read_scores
from shared.columns import to_column
from tests.interpreted import check_interpreted
from tests.worker_svc.oracle import Oracle, Verdict
from tests.worker_svc.ranks import Ranks, ranks
from tests.worker_svc.test_oracle import generate_all
from tests.worker_svc.test_speculation import SAMPLINGS as OTHER_SAMPLINGS
from worker_svc.model.families import ARCHITECTURES

PROMPT_LENGTHS = (1, 5, 33, 130)
COUNT = 20


@pytest.fixture(scope="module", params=["one machine", pytest.param("several machines", marks=pytest.mark.release)])
def pair(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two ranks, which add up through shared memory or through sockets."""
    with ranks(2, one_machine=request.param == "one machine") as started:
        yield started


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_generate(architecture: str, pair: Ranks, tmp_path: Path) -> None:
    """Every family of our own code gives the oracle's tokens on two ranks, whatever the plans look like."""
    folder = make_checkpoint(architecture, tmp_path)
    oracle = Oracle(folder)
    with pair.driver(folder, seed=3, max_num_seqs=4, max_num_batched_tokens=96) as driver:
        prompts = [driver.rng.integers(0, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]
        answers, _ = generate_all(driver, prompts)

    verdict = Verdict()
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.judge(prompt, answer, verdict)
    assert verdict.near_ties * 1000 <= verdict.num_tokens, f"{verdict.near_ties} near ties"


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_ranks_divide_experts_in_one_tensor(architecture: str, pair: Ranks, tmp_path: Path) -> None:
    """A checkpoint with all experts of a layer in one tensor gives the tokens of one with a tensor for each expert."""
    folder = make_checkpoint(architecture, tmp_path)
    oracle = Oracle(folder)
    merge_experts(folder)

    check_against(oracle, folder, pair)


@pytest.mark.parametrize(
    "heads",
    [
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
        {"num_attention_heads": 10, "num_key_value_heads": 5, "hidden_size": 160, "attention_bias": True},
        {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 192},
        # With torch kernels: heads of 12 elements.
        {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 144},
    ],
    ids=str,
)
def test_ranks_copy_kv_heads_that_they_do_not_divide(heads: dict[str, int], pair: Ranks, tmp_path: Path) -> None:
    """A KV head whose query heads are on two ranks is on both; a rank's query heads share their heads evenly."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path, **heads)

    check_against(Oracle(folder), folder, pair)


def check_against(oracle: Oracle, folder: Path, pair: Ranks) -> None:
    """Two ranks give the oracle's tokens."""
    with pair.driver(folder, seed=3, max_num_seqs=4, max_num_batched_tokens=96, dtype="float32") as driver:
        prompts = [driver.rng.integers(0, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]
        answers, _ = generate_all(driver, prompts)
    verdict = Verdict()
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.judge(prompt, answer, verdict)
    assert verdict.near_ties * 1000 <= verdict.num_tokens, f"{verdict.near_ties} near ties"


def merge_experts(folder: Path) -> None:
    """Rewrites a checkpoint of a mixture in the layout in which the classes of `transformers` 5 hold it."""
    experts: dict[str, list[torch.Tensor]] = defaultdict(list)
    tensors = {}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items(), key=lambda item: _places(item[0])):
        layer, found, rest = re.sub("block_sparse_moe", "mlp", name).partition(".experts.")
        if not found:
            tensors[re.sub("block_sparse_moe", "mlp", name)] = tensor
            continue
        kind = rest.split(".")[1]
        part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(kind, kind)
        experts[f"{layer}.experts.{part}"].append(tensor)
    for name, gates in list(experts.items()):
        if name.endswith("gate_proj"):
            stem = name.removesuffix("gate_proj")
            tensors[f"{stem}gate_up_proj"] = torch.cat((torch.stack(gates), torch.stack(experts[f"{stem}up_proj"])), 1)
            tensors[f"{stem}down_proj"] = torch.stack(experts[f"{stem}down_proj"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _places(name: str) -> list[int]:
    """The numbers in a name, so that experts are in order."""
    return [int(number) for number in re.findall(r"\.(\d+)\.", name)]


SAMPLINGS = {
    "plain": plan_pb2.SamplingParams(temperature=1.5, top_p=1, seed=7),
    "cold": plan_pb2.SamplingParams(temperature=0.2, top_p=1, seed=1 << 63, choice=2),
    "banned": plan_pb2.SamplingParams(
        temperature=1.0, top_p=1, seed=9, banned_token_ids=to_column(list(range(0, VOCAB_SIZE, 2)))
    ),
    **{name: sampling for name, sampling in OTHER_SAMPLINGS.items() if "grammar" not in name},
}


@pytest.mark.parametrize("speculation", ["off", "ngram", "draft"])
@pytest.mark.parametrize("names", [["plain", "cold", "greedy"], list(SAMPLINGS)], ids=["exchanged", "gathered"])
def test_sampled_tokens_equal_those_of_one_process(
    names: list[str], speculation: str, pair: Ranks, tmp_path: Path
) -> None:
    """Rows with and without filters, rules and log-probabilities in one batch get the tokens and scores of one process.

    So do rows with drafts.
    """
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    settings: dict[str, Any] = {
        "speculation": speculation,
        "draft_model": str(folder) if speculation == "draft" else "",
    }

    def generate(driver: Driver) -> tuple[list[list[int]], int]:
        prompts = [[9, 10, 11, number] * 3 for number in range(len(names))]
        rows = [driver.admit(prompt, sampling=SAMPLINGS[name]) for prompt, name in zip(prompts, names, strict=True)]
        for row in rows:
            driver.chunk(row, 12)
        num_scores = 0
        while min(len(driver.rows[row].tokens) for row in rows) < 12 + COUNT:
            driver.step()
            num_scores += len(driver.last_result.scores)
            if speculation != "off" and driver.plan.step == 3:
                for row in rows:
                    driver.speculate(row, 3)
        return [driver.leave(row)[: 12 + COUNT] for row in rows], num_scores

    expected = generate(Driver(make_engine(folder, **settings)))
    with pair.driver(folder, **settings) as driver:
        found = generate(driver)

    assert found == expected
    assert (driver.num_drafted > 0) == (speculation != "off")


@pytest.mark.parametrize(
    ("layout", "only"),
    [
        ("gptq-int4", ".layers."),
        ("gptq-int4-order", ".layers."),
        ("ct-int8-channel", ".layers."),
        ("ct-int4", ""),  # The embedding and the LM head are quantised too.
    ],
)
def test_ranks_divide_quantised_checkpoints(layout: str, only: str, pair: Ranks, tmp_path: Path) -> None:
    """Log-probabilities of a prompt are near those of one process, which rounds activations by other scales."""
    folder = make_pair(layout, tmp_path, only=only).quantised
    prompt = list(range(3, 43))
    sampling = plan_pb2.SamplingParams(prompt_logprobs=0)

    def logprobs(driver: Driver) -> torch.Tensor:
        driver.chunk(driver.admit(prompt, sampling=sampling), len(prompt))
        driver.step()
        (section,) = driver.last_result.scores
        return torch.tensor([scored.logprob for scored in read_scores(section.scores)])

    expected = logprobs(Driver(make_engine(folder)))
    with pair.driver(folder) as driver:
        found = logprobs(driver)

    assert len(found) == len(prompt) - 1
    assert float((found - expected).abs().mean()) < 0.05


@pytest.mark.release
def test_the_device_path_of_two_ranks() -> None:
    """Interpreted kernels under the engine of a GPU give the tokens of one process on two ranks."""
    pytest.importorskip("triton", reason="the kernels need triton to be interpreted")
    check_interpreted(Path(__file__).parent / "interpreted" / "test_tensor_parallel.py")
