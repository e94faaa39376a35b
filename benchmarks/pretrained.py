"""Pretrained models with LoRA: SmolLM2-135M-Instruct on one-step word problems, and a Qwen2.5 model on GSM8K.

Neither weights nor GSM8K are in the repository. `benchmarks/.cache` needs copies of them: `smollm2-135m` from
HuggingFaceTB/SmolLM2-135M-Instruct, `qwen2.5-coder-0.5b` from Qwen/Qwen2.5-Coder-0.5B-Instruct, and `gsm8k_train.jsonl`
and `gsm8k_test.jsonl`. To copy a large file in parts: `split -b 24M FILE part-`, then `cat part-* > FILE`.

The model reads worked examples before each prompt, and a completion ends at the first line break. Frozen weights are in
bfloat16 and the adapter is in float32, apart from them, in training and sampling.
"""

import random
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import sdpa_mask

from topr_trl.tasks import gsm8k

SMOL, QWEN = "smollm2-135m", "qwen2.5-coder-0.5b"
BASES = {SMOL: 40, QWEN: 160}  # most tokens of a completion; right ones have about 20 and 85
HASHES = {SMOL: "7ef915c9bf9d"}  # of the weights of published results, which were dequantized from 4 bits
KINDS = (
    ("{name} has {x} {things} and finds {y} more. How many {things} does {name} have now?", "+"),
    ("{name} has {x} {things} and gives {y} of them away. How many {things} does {name} have now?", "-"),
    ("{name} fills {x} boxes with {y} {things} each. How many {things} are in the boxes?", "*"),
    ("{name} has {x} times as many {things} as Mira. Mira has {y} {things}. How many {things} does {name} have?", "*"),
    ("{name} divides {x} {things} among {y} friends. How many {things} does each friend get?", "/"),
)
NAMES, THINGS = ("Ana", "Ben", "Dan", "Eva", "Finn", "Hana"), ("pens", "cards", "coins", "shells", "stamps", "books")
WORKED = "\n\n".join(
    f"Question: {question}\nAnswer: {line}. The answer is {answer}."
    for question, line, answer in (
        ("Otto has 5 apples and buys 4 more. How many apples does Otto have now?", "5 + 4 = 9", 9),
        ("A shelf has 3 rows of 7 jars. How many jars are on the shelf?", "3 * 7 = 21", 21),
        ("A rope of 12 meters is cut into 4 equal pieces. How many meters has each piece?", "12 / 4 = 3", 3),
    )
)
EXAMPLES = {SMOL: WORKED, QWEN: "\n\n".join(gsm8k.EXEMPLARS[:2])}


def problems(count: int, seed: int) -> Dataset:
    """Return word problems, as `topr_trl.tasks.gsm8k` prepares them, with numbers of one to three digits."""
    rng = random.Random(seed)
    return gsm8k.prepare(Dataset.from_list([_problem(rng) for _ in range(count)]), num_shots=0)


def _problem(rng: random.Random) -> dict[str, str]:
    text, sign = rng.choice(KINDS)
    largest = rng.choice((9, 30, 99))
    x, y = rng.randint(2, largest), rng.randint(2, largest if sign == "+" else 9)
    if sign == "-":
        x += y
    elif sign == "/":
        x *= y
    answer = {"+": x + y, "-": x - y, "*": x * y, "/": x // y}[sign]
    question = text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), x=x, y=y)
    return {"question": question, "answer": f"#### {answer}"}


def load(folder: Path, tokenizer: PreTrainedTokenizerBase, examples: str) -> PreTrainedModel:
    """Return the model with a new adapter. It reads `examples` before each input, and runs under autocast."""
    on_cpu = torch.get_default_device().type == "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=_ON_CPU if on_cpu else "sdpa"
    )
    breaks = [token for word, token in tokenizer.get_vocab().items() if word.startswith("Ċ")]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *breaks]
    trunk = model.base_model
    model = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"))
    for module in model.modules():
        module.cast_input_dtype_enabled = False  # PEFT would cast inputs to float32, and autocast would cast them back
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model = model.to(torch.get_default_device())
    forward = after(torch.tensor([tokenizer(examples + "\n\n")["input_ids"]]), trunk)
    trunk.forward = torch.autocast(model.device.type, torch.bfloat16)(forward)
    return model


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Return the attention's output, in training computed in float32: on a CPU, its gradient takes a third of the time.

    Heads share keys and values without copies.
    """
    kind = query.dtype
    if query.requires_grad:
        query, key, value = query.float(), key.float(), value.float()
    with torch.autocast("cpu", enabled=False):
        found = scaled_dot_product_attention(
            query, key, value, attention_mask, scale=settings["scaling"], enable_gqa=True,
            is_causal=attention_mask is None and query.size(2) > 1,
        )  # fmt: skip
    return found.to(kind).transpose(1, 2), None


_ON_CPU = "benchmarks"
AttentionInterface.register(_ON_CPU, _attention)
AttentionMaskInterface.register(_ON_CPU, sdpa_mask)


def after(beginning_1T: Tensor, trunk: PreTrainedModel) -> Any:
    """Return a forward pass that reads the same tokens before each input, and computes them once for all rows."""
    forward, length = trunk.forward, beginning_1T.size(1)
    if "cache" not in signature(forward).parameters:
        raise ImportError("This version of transformers passes no `cache`. Install the newest one.")

    def own(
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DynamicCache | None = None,
        **settings: Any,
    ) -> Any:
        cache = DynamicCache(config=trunk.config) if cache is None else cache
        if cache.get_seq_length() == 0:
            forward(input_ids=beginning_1T, cache=cache)
            cache.batch_repeat_interleave(len(input_ids))
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask.new_ones(len(input_ids), length), attention_mask], dim=1)
        if position_ids is not None:
            position_ids = position_ids + length
        return forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache, **settings
        )

    return own
