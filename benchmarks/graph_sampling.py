"""Sample from a Qwen2 model without vLLM. On a GPU, a decoding step is one CUDA graph.

`install()` replaces transformers' `generate` with this module in the current process. The first tokens that all prompts
share, such as worked examples, are computed once.

Shape letters: B sequences, P shared tokens, L slots of the cache, H key heads with G query heads each, D width of a
head, T tokens, V size of the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from topr_trl.generation import transformers as backend

PROMPTS = 32  # prompts of a forward pass
CHECK_EVERY = 8  # steps on a CPU between removals of finished sequences


def install() -> None:
    """Make `topr sample` and `topr evaluate` use this module."""
    backend._generate = generate


@torch.no_grad()
def generate(model: Any, tokenizer: Any, prompts: list[list[int]], config: Any) -> tuple[list[Any], list[Any]]:
    """Return the padded tokens of each completion, and their log-probabilities, like the `_generate` that it replaces.

    On a GPU, each completion is sampled at full length, because the shapes of a graph are fixed. Each completion is cut
    after its first stop token or stop string.
    """
    count, steps, device = config.num_return_sequences or 1, config.max_new_tokens, model.device
    decoder = _Decoder(model, prompts, count, steps)
    rows = len(prompts) * count
    tokens = torch.full((rows, steps), config.pad_token_id, device=device)
    logps = torch.zeros(rows, steps, device=device)
    suppressed = [] if config.pad_token_id in config.eos_token_id else [config.pad_token_id]
    pick = _Pick(config, rows, suppressed, decoder.head.out_features, device)
    running = torch.arange(rows, device=device)

    def step() -> None:
        pick(decoder.logits())
        decoder.advance(pick.token)

    pick.renew()
    pick(decoder.first_logits)
    tokens[:, 0], logps[:, 0] = pick.token, pick.logp
    decoder.begin(pick.token)
    run = _captured(step, decoder, pick) if device.type == "cuda" else step
    for n in range(1, steps):
        if device.type == "cpu" and n % CHECK_EVERY == 0:
            going = [len(_cut(ids, config, tokenizer)) == n for ids in tokens[running, :n].tolist()]
            kept = torch.tensor(going).nonzero()[:, 0]
            if not len(kept):
                break
            if len(kept) < len(running):
                running = running[kept]
                decoder.keep(kept)
                pick.keep(kept)
        pick.renew()
        run()
        tokens[running, n], logps[running, n] = pick.token, pick.logp
    found = [_cut(ids, config, tokenizer) for ids in tokens.tolist()]
    return [ids + [config.pad_token_id] * (steps - len(ids)) for ids in found], logps.tolist()


def _cut(ids: list[int], config: Any, tokenizer: Any) -> list[int]:
    """Return the tokens up to the first stop token or the first token that completes a stop string."""
    ends = [n + 1 for n, token in enumerate(ids) if token in config.eos_token_id]
    ids = ids[: ends[0]] if ends else ids
    stops = config.stop_strings or []

    def stopped(length: int) -> bool:
        text = tokenizer.decode(ids[:length])
        return any(stop in text for stop in stops)

    if not stopped(len(ids)):
        return ids
    low, high = 0, len(ids)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle, high)
    return ids[:high]


def _common_length(prompts: list[list[int]]) -> int:
    """Return the number of first tokens that all prompts share. The last token of a prompt is not counted."""
    first, last = min(prompts), max(prompts)
    shared = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return min(shared, min(map(len, prompts)) - 1)


class _Pick:
    """Callable that chooses tokens from logits: greedy, or sampled with top-k and temperature."""

    def __init__(self, config: Any, rows: int, suppressed: list[int], vocabulary: int, device: Any) -> None:
        self.greedy = not config.do_sample
        if not self.greedy and (config.top_p or 1.0) != 1.0:
            raise ValueError("top_p is not supported in benchmarks.graph_sampling.")
        self.temperature, self.top_k = config.temperature, min(config.top_k or vocabulary, vocabulary)
        self.suppressed = torch.tensor(suppressed, dtype=torch.long, device=device)
        self.token = torch.zeros(rows, dtype=torch.long, device=device)
        self.logp = torch.zeros(rows, device=device)
        self.noise = torch.ones(rows, 1 if self.greedy else self.top_k, device=device)

    def renew(self) -> None:
        """Draw the random numbers of the next token, outside the graph, which would repeat them at each step."""
        self.noise.exponential_()

    def keep(self, rows: Tensor) -> None:
        """Keep only some of the sequences."""
        self.token, self.logp, self.noise = self.token[rows], self.logp[rows], self.noise[rows]

    def __call__(self, logits: Tensor) -> None:
        logits = logits.float()
        total = logits.logsumexp(1)
        allowed = logits.index_fill(1, self.suppressed, -torch.inf) if len(self.suppressed) else logits
        if self.greedy:
            token = allowed.argmax(1)
        else:
            values, places = allowed.topk(self.top_k, dim=1)
            chosen = ((values / self.temperature).softmax(1) / self.noise).argmax(1, keepdim=True)
            token = places.gather(1, chosen).squeeze(1)
        self.token.copy_(token)
        self.logp.copy_(logits.gather(1, token[:, None]).squeeze(1) - total)


class _Decoder:
    """Qwen2 model with a cache of fixed size. Prompts without their shared tokens are padded on the left."""

    def __init__(self, model: Any, prompts: list[list[int]], count: int, steps: int) -> None:
        config, device = model.config, model.device
        self.model, self.heads = model.model, config.num_key_value_heads
        self.head, self.groups = model.lm_head, config.num_attention_heads // config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        theta = config.rope_parameters["rope_theta"]
        self.frequencies = 1.0 / theta ** (torch.arange(0, self.size, 2, device=device).float() / self.size)
        self.shared: list[list[Tensor]] = []  # keys and values of the shared tokens, by layer
        self.common = common = _common_length(prompts)
        prompts, beginning = [ids[common:] for ids in prompts], prompts[0][:common]
        self.width = width = max(map(len, prompts))
        slots, rows = -(-(width + steps) // 16) * 16, len(prompts) * count
        shape = (rows, self.heads, slots, self.size)
        self.cache = [[torch.zeros(shape, dtype=model.dtype, device=device) for _ in "kv"] for _ in self.model.layers]
        self.hidden_BL = torch.full((rows, slots), -torch.inf, device=device)  # added to scores, so -inf hides a slot
        self._read_shared(beginning)
        last = []
        for start in range(0, len(prompts), PROMPTS):
            last.append(self._read(prompts[start : start + PROMPTS], start * count, count))
        self.first_logits = self.head(torch.cat(last)).repeat_interleave(count, 0)
        lengths = torch.tensor([common + len(ids) for ids in prompts for _ in range(count)], device=device)
        self.position, self.slot = lengths, torch.tensor([width], device=device)
        self.token = torch.zeros(rows, dtype=torch.long, device=device)

    def keep(self, rows: Tensor) -> None:
        """Keep only some of the sequences."""
        self.cache = [[stored[rows] for stored in layer] for layer in self.cache]
        self.hidden_BL, self.position, self.token = self.hidden_BL[rows], self.position[rows], self.token[rows]

    def begin(self, token: Tensor) -> None:
        """Add the first token."""
        self.token.copy_(token)
        self.hidden_BL[:, self.width] = 0.0

    def advance(self, token: Tensor) -> None:
        """Add the next token."""
        self.token.copy_(token)
        self.position += 1
        self.slot += 1
        self.hidden_BL.index_fill_(1, self.slot, 0.0)

    def logits(self) -> Tensor:
        """Return (B, V) logits after the last token."""

        def attend(n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache[n]
            keys.index_copy_(2, self.slot, k)
            values.index_copy_(2, self.slot, v)
            q = q.view(len(q), self.heads, self.groups, self.size)  # (B, H, G, D)
            shared_keys, shared_values = self.shared[n]  # (H, P, D)
            of_head = q.transpose(0, 1).flatten(1, 2)  # (H, B·G, D)
            common = (of_head @ shared_keys.transpose(1, 2)).view(self.heads, len(q), self.groups, -1).transpose(0, 1)
            scores = torch.cat([common, q @ keys.transpose(2, 3)], -1).float() * self.size**-0.5
            scores[..., self.common :] += self.hidden_BL[:, None, None]
            weights = scores.softmax(-1).to(values.dtype)
            common = weights[..., : self.common].transpose(0, 1).flatten(1, 2) @ shared_values
            common = common.view(self.heads, len(q), self.groups, self.size).transpose(0, 1)
            return (common + weights[..., self.common :] @ values).reshape(len(q), 1, -1)

        return self.head(self._layers(self.token[:, None], self.position[:, None], attend)[:, 0])

    def _read_shared(self, ids: list[int]) -> None:
        """Compute the keys and values of the shared tokens."""

        def attend(n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.shared.append([k[0], v[0]])
            k, v = (x.repeat_interleave(self.groups, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

        device = self.hidden_BL.device
        self._layers(
            torch.tensor([ids], device=device, dtype=torch.long), torch.arange(len(ids), device=device)[None], attend
        )

    def _read(self, prompts: list[list[int]], first: int, count: int) -> Tensor:
        """Compute prompts, fill the cache, and return the hidden states of their last tokens."""
        device, width = self.hidden_BL.device, self.width
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        pads = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
        at = torch.arange(width, device=device)
        real = at[None] >= pads[:, None]
        mask = real[:, None] & (at[None, :, None] >= at[None, None])
        # Padding attends to itself, because attention without any key is NaN.
        mask = F.pad(mask | torch.eye(width, dtype=torch.bool, device=device), (self.common, 0), value=True)
        rows = slice(first, first + len(prompts) * count)
        self.hidden_BL[rows, :width] = torch.where(real, 0.0, -torch.inf).repeat_interleave(count, 0)

        def attend(n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for stored, new in zip(self.cache[n], (k, v), strict=True):
                stored[rows, :, :width] = new.repeat_interleave(count, 0)
            k, v = (
                torch.cat([before.expand(len(x), *before.shape), x], 2).repeat_interleave(self.groups, 1)
                for before, x in zip(self.shared[n], (k, v), strict=True)
            )
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]).transpose(1, 2).flatten(2)

        return self._layers(ids, self.common + (at[None] - pads[:, None]).clamp(min=0), attend)[:, -1]

    def _layers(self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], -1)[:, None]  # (B, 1, T, D)
        x = self.model.embed_tokens(ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], -1, self.size).transpose(1, 2)

        def turned(y: Tensor) -> Tensor:
            left, right = y.chunk(2, -1)
            return y * cos + torch.cat([-right, left], -1) * sin

        for n, layer in enumerate(self.model.layers):
            attention, y = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (split(project(y)) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
            x = x + attention.o_proj(attend(n, turned(q), turned(k), v))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x)


def _captured(step: Callable[[], None], decoder: _Decoder, pick: _Pick) -> Callable[[], None]:
    """Capture a step in a graph. Restore the state afterwards, because warm-up steps change it."""
    kept = [decoder.token, decoder.position, decoder.slot, decoder.hidden_BL, pick.token, pick.logp]
    before = [tensor.clone() for tensor in kept]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for tensor, old in zip(kept, before, strict=True):
        tensor.copy_(old)
    return graph.replay
