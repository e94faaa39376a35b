"""Read `train_data_step{N}.jsonl`, which NeMo-RL logs during training."""

from topr_trl.importing.format import Format, LeftOut, Record, has
from topr_trl.importing.row_table import Row


def rows(record: Record) -> list[Row | LeftOut]:
    """Return one row of token ids, or `[LeftOut.MASKED]` for a sample that the loss ignored.

    Each list is a batch with one sample, whose tokens are padded on the right. A log-probability has the index of its
    token. The log-probability of a token that the policy did not generate is 0.
    """
    one = {name: value[0] if isinstance(value, list) else value for name, value in record.items()}
    ids, mask, logps = (
        one[name][: one["input_lengths"]] for name in ("token_ids", "token_loss_mask", "generation_logprobs")
    )
    mask = [int(value) for value in mask]
    if 1 not in mask or one.get("sample_loss_mask") == 0:
        return [LeftOut.MASKED]
    first = mask.index(1)
    texts = one["content"]
    return [
        {
            "prompt": texts[0], "completion": "".join(texts[1:]),  # only for display; the trainer uses the token ids
            "prompt_ids": ids[:first], "completion_ids": ids[first:], "completion_mask": mask[first:],
            "sampler_logps": [logp if own else None for logp, own in zip(logps[first:], mask[first:], strict=True)],
        }
    ]  # fmt: skip


FORMAT = Format(
    source="NeMo-RL (nemo_rl/algorithms/grpo.py at 002cdc2, nemo_rl/utils/logger.py at 0275e75)",
    test=has("token_ids", "token_loss_mask", "generation_logprobs"),
    rows=rows,
    rewards=lambda record: {"rewards": record["rewards"][0]},
    columns=("prompt_ids", "completion_ids", "completion_mask", "sampler_logps", "problem_id"),
    required=frozenset({
        "content", "rewards", "input_lengths", "token_ids", "token_loss_mask", "generation_logprobs"
    }),
    optional=frozenset({"sample_loss_mask", "advantages", "prev_logprobs", "filtered_rewards", "agent_ref", "idx"}),
    loses="Rewards are the scaled and shaped rewards that NeMo-RL trained on. The files lack the temperature: "
    "set --temperature if it was not 1.",
)  # fmt: skip
