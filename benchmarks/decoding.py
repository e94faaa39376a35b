"""Sample completions of a tiny model. On a CPU, this is more than twice as fast as `generate`.

Each prompt is computed once for all of its completions, keys and values are written in place, and finished rows leave
the batch. The distribution is the same as in `topr_trl.sample_completions`. Temperature 0 is greedy decoding.
"""

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from topr_trl import SamplingArguments
from topr_trl.data.text_tokens import stop_tokens
from topr_trl.generation.settings import Draw, encode_prompts, rows_of_draws

DRAWS = 3  # version of the sampling; increase it after changes, so that results of different rows are not compared
ROWS = 512  # completions of a batch
_LARGE = 10_000  # tokens of a vocabulary for which `torch.multinomial` takes most of the time
_ROOM = 32  # tokens by which the cache grows
_LEFT = 0.8  # share of unfinished rows in a batch, below which finished rows are removed


class _Layer(DynamicLayer):
    """Cache layer with room for further tokens. `DynamicLayer` copies all keys and values for each token."""

    room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if self.room is None or end > self.room[0].shape[-2]:
            batch, heads, _, width = key_states.shape
            grown = tuple(key_states.new_empty(batch, heads, end + _ROOM, width) for _ in range(2))
            if begin:
                grown[0][:, :, :begin], grown[1][:, :, :begin] = self.keys, self.values
            self.room = (grown[0], grown[1])
        self.room[0][:, :, begin:end], self.room[1][:, :, begin:end] = key_states, value_states
        self.keys, self.values = (of_all[:, :, :end] for of_all in self.room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.room = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.room = None


Drawn = tuple[list[int], list[float], bool]  # token ids and log-probabilities of a completion, and whether it has ended


def draw(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Dataset, count: int, longest: int, seed: int,
    temperature: float = 1.0,
) -> Dataset:  # fmt: skip
    """Return `count` completions of each problem with at most `longest` tokens, like `sample_completions`."""
    args = SamplingArguments(num_generations=count, max_new_tokens=longest, top_k=model.config.vocab_size)
    prompts = encode_prompts(tokenizer, problems, args, model.config.max_position_embeddings)
    drawn = draw_ids(model, tokenizer, prompts, count, longest, seed, temperature)
    draws = [
        [Draw(ids, "stop" if has_ended else "length", logps, temperature) for ids, logps, has_ended in of_problem]
        for of_problem in drawn
    ]
    return rows_of_draws(draws, problems, prompts, tokenizer, args)


@torch.no_grad()
def draw_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], count: int, longest: int,
    seed: int, temperature: float = 1.0,
) -> list[list[Drawn]]:  # fmt: skip
    """Return `count` completions of each prompt."""
    was_training = model.training
    model.eval()
    stops = torch.tensor(stop_tokens(tokenizer, model.generation_config))
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: list[list[Drawn]] = [[] for _ in prompts]
    for begin in range(0, len(order), max(ROWS // count, 1)):
        batch = order[begin : begin + max(ROWS // count, 1)]
        drawn = _of_batch(
            model, [prompts[i] for i in batch], count, longest, stops, tokenizer.pad_token_id, generator, temperature
        )
        for n, completion in enumerate(drawn):
            found[batch[n // count]].append(completion)
    model.train(was_training)
    return found


def _of_batch(
    model: PreTrainedModel, prompts: list[list[int]], count: int, longest: int, stops: Tensor, pad: int | None,
    generator: torch.Generator, temperature: float,
) -> list[Drawn]:  # fmt: skip
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache = DynamicCache(config=model.config)
    cache.layers = [_Layer() for _ in cache.layers]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    last = torch.tensor([width - 1])  # not 1: a product with a slice copies all weights of the head for each row
    found = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=last
    )
    cache.batch_repeat_interleave(count)
    logits, mask, position = (
        of_prompt.repeat_interleave(count, dim=0) for of_prompt in (found.logits[:, -1], mask, positions[:, -1:])
    )
    total = len(prompts) * count
    tokens_BT, logps_BT = torch.zeros(total, longest, dtype=torch.long), torch.zeros(total, longest)
    lengths, running = torch.full((total,), longest), torch.ones(total, dtype=torch.bool)
    here = torch.arange(total)  # completion of each row of the batch
    for step in range(longest):
        logps = (logits.float() / (temperature or 1.0)).log_softmax(-1)
        chances = logps.exp()
        if pad is not None and pad not in stops:
            chances[:, pad] = 0
        token = _drawn(chances, generator) if temperature else chances.argmax(-1, keepdim=True)
        tokens_BT[here, step], logps_BT[here, step] = token[:, 0], logps.gather(1, token)[:, 0]
        ends = torch.isin(token[:, 0], stops) & running[here]
        lengths[here[ends]] = step + 1
        running[here[ends]] = False
        goes_on = running[here]
        if step + 1 == longest or not goes_on.any():
            break
        if goes_on.float().mean() < _LEFT:
            kept = goes_on.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            here, mask, position, token = here[kept], mask[kept], position[kept], token[kept]
        position = position + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = model(
            input_ids=token, attention_mask=mask, position_ids=position, past_key_values=cache
        ).logits[:, -1]  # fmt: skip
    tokens, logps, unfinished = tokens_BT.tolist(), logps_BT.tolist(), running.tolist()
    return [(tokens[n][:length], logps[n][:length], not unfinished[n]) for n, length in enumerate(lengths.tolist())]


def _drawn(chances: Tensor, generator: torch.Generator) -> Tensor:
    """Return (N, 1) tokens drawn from (N, V) probabilities."""
    if chances.size(1) < _LARGE:
        return torch.multinomial(chances, 1, generator=generator)
    sums = chances.cumsum(-1)
    places = torch.rand(len(sums), 1, generator=generator) * sums[:, -1:]
    return torch.searchsorted(sums, places, right=True)
