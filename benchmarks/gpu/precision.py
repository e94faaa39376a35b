"""How far log-probabilities in bfloat16 are from those in float32, by length: what a ratio of fresh rows is off by."""

from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.cells import Cell, Store
from benchmarks.gpu.steps import SHAPES, Machine

LENGTHS, ROWS = (256, 1_024, 4_096, 8_192), 8


def cells(tiny: bool, store: Store) -> list[Cell]:
    shape = "tiny" if tiny else "0.5b"
    lengths = (16,) if tiny else LENGTHS
    return [{"claim": "precision", "model": shape, "tokens": length} for length in lengths]


@torch.no_grad()
def work(cell: Cell, machine: Machine) -> dict[str, Any]:
    """Completions that the model itself draws, token by token from its own distribution."""
    torch.manual_seed(0)
    config = SHAPES[cell["model"]]
    with torch.device(machine.device):
        exact = LlamaForCausalLM._from_config(config, dtype=torch.float32).eval()
        # A random head is near uniform; a larger one is as sure of its tokens as a trained model.
        exact.get_output_embeddings().weight.mul_(8.0)
        start = torch.randint(config.vocab_size, (ROWS, 1))
    rounded = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).to(machine.device).eval()
    rounded.load_state_dict(exact.state_dict())
    drawn = exact.generate(
        start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, max_new_tokens=cell["tokens"],
        min_new_tokens=cell["tokens"], pad_token_id=0,
    )  # fmt: skip
    logps, of_rounded = (torch.stack([_logps(model, row) for row in drawn]) for model in (exact, rounded))
    gaps = of_rounded - logps
    sums = gaps.sum(1)
    return {
        "token_mean": gaps.mean().item(), "token_spread": gaps.std().item(),
        "completion_mean": sums.mean().item(), "completion_spread": sums.std().item(),
        "entropy": -logps.mean().item(),
    }  # fmt: skip


def _logps(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
