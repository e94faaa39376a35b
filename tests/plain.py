"""What is computed plainly, to hold the trainers against."""

import torch
from torch import Tensor
from transformers import PreTrainedModel


def plain_logps(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """(B, T) log π of the completions of a batch of `GRPOTrainer`, by a plain forward; 0 where there is padding."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
    logps = logits.gather(2, ids[:, 1:, None]).squeeze(2)[:, -batch["completion_ids"].size(1) :]
    return logps * batch["completion_mask"]
