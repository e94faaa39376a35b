"""Build a row of an earlier generation batch, and a new generation batch, for tests of replay."""

import torch

from topr_trl.trainers.replay.buffer import ReplayRow


def row(number, reward=-1.0, prompt=(5, 6), completion=(7, 8, 9), weight=1.0, written=None):
    return ReplayRow(
        prompt_ids=torch.tensor(prompt, dtype=torch.int32), completion_ids=torch.tensor(completion, dtype=torch.int32),
        written=torch.ones(len(completion), dtype=torch.bool) if written is None else torch.tensor(written),
        mu_logps=-0.1 * torch.arange(1, len(completion) + 1), reward=reward, number=number, step=0, weight=weight,
    )  # fmt: skip


def batch_of(rewards, **more):
    count = len(rewards)
    return {
        "prompt_ids": torch.tensor([[0, 3, 4]] * count), "prompt_mask": torch.tensor([[0, 1, 1]] * count),
        "completion_ids": torch.tensor([[7, 8, 9, 1]] * count), "completion_mask": torch.tensor([[1, 1, 1, 0]] * count),
        "advantages": torch.zeros(count), "num_items_in_batch": torch.tensor(3 * count),
        "topr_rewards": torch.tensor(rewards), "topr_rows": torch.arange(count) + 100, **more,
    }  # fmt: skip
