"""Offline TOPR on the logged runs of an agent with tools. See docs/agents.md.

    python examples/agent.py

A notebook of cells, a few minutes on a laptop's CPU, no download. The embedded model learns from a careless author to
look up prices and to call a calculator; its runs are logged as messages, and copies of it learn from that log.
"""

# %% Settings
import random
import re
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from topr_trl import (
    Evaluations,
    OfflineTOPRConfig,
    OfflineTOPRTrainer,
    SamplingArguments,
    evaluate_rows,
    load_rows,
    sample_completions,
    save_rows,
)
from topr_trl.tasks.arithmetic import CARELESS_MODEL

OUT, SEED = Path("topr-agent"), 0
WARM_UP_RUNS, LOGGED_PROBLEMS, HELD_OUT_PROBLEMS, RUNS, MOST_TURNS = 8_000, 300, 200, 8, 5
ON_A_CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "optim": "adamw_torch", "seed": SEED,
            "save_strategy": "no", "report_to": "none"}  # fmt: skip
THINGS = ("apples", "pens", "cards", "shells", "stamps", "coins", "beads", "books", "nuts", "pins")
rng = random.Random(SEED)


# %% The environment: a shop with two tools. What they say is the agent's context, not its own words.
class Shop:
    """A shop with prices of its own; `lookup` says more than was asked for, as tools do."""

    def __init__(self) -> None:
        self.prices = {thing: rng.randint(2, 20) for thing in THINGS}
        (self.first, self.second), self.counts = rng.sample(THINGS, 2), (rng.randint(2, 9), rng.randint(2, 9))
        self.answer = sum(n * self.prices[thing] for n, thing in zip(self.counts, self.things, strict=True))
        self.question = f"How many coins is {self.counts[0]} {self.first} and {self.counts[1]} {self.second}?"

    @property
    def things(self) -> tuple[str, str]:
        return self.first, self.second

    def lookup(self, thing: str) -> str:
        if thing not in self.prices:
            return "no such thing"
        others = ", ".join(f"{n} {other}" for other, n in rng.sample([*self.prices.items()], 4))
        return f"{thing}: {self.prices[thing]} coins. Also: {others}."

    def calculate(self, text: str) -> str:
        if not re.fullmatch(r"\d{1,3}( [*+] \d{1,3}){1,5}", text):
            return "not a number"
        return str(eval(text))


def call(name: str, argument: str) -> dict:
    return {"role": "assistant", "content": None,
            "tool_calls": [{"type": "function", "function": {"name": name, "arguments": {"text": argument}}}]}  # fmt: skip


def use_tool(shop: Shop, message: dict) -> dict:
    function = message["tool_calls"][0]["function"]
    said = getattr(shop, function["name"])(function["arguments"]["text"])
    return {"role": "tool", "name": function["name"], "content": said}


# %% A careless author, from whom the model learns to use the tools, mistakes included.
def run_carelessly(shop: Shop) -> list[dict]:
    """A run in which a price may be of another thing, a sign wrong, or the calculator not asked."""
    messages, parts = [], []
    for n, thing in zip(shop.counts, shop.things, strict=True):
        asked = rng.choice(THINGS) if rng.random() < 0.15 else thing
        messages += [call("lookup", asked)]
        messages += [use_tool(shop, messages[-1])]
        parts.append(f"{n} {'+' if rng.random() < 0.15 else '*'} {shop.prices[asked]}")
    messages += [call("calculate", " + ".join(parts))]
    messages += [use_tool(shop, messages[-1])]
    result = int(messages[-1]["content"]) + (rng.choice((-10, -1, 1, 10)) if rng.random() < 0.15 else 0)
    return [*messages, {"role": "assistant", "content": f"The answer is {result}."}]


# %% The embedded model, with a chat template, is taught by the author.
tokenizer = AutoTokenizer.from_pretrained(CARELESS_MODEL)
tokenizer.chat_template = """\
{%- for message in messages %}
{%- if message.role == "assistant" %}{{ "Answer:" }}
{%- for call in message.tool_calls or [] %} {{ call.function.name }} {{ call.function.arguments.text }}{% endfor %}
{%- if message.content %} {{ message.content }}{% endif %}{{ eos_token }}
{%- else %}{{ {"user": "Question: ", "tool": "Tool: "}[message.role] }}{{ message.content }}
{%- endif %}{{ "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "Answer:" }}{% endif %}"""


def ask(shop: Shop) -> list[dict]:
    return [{"role": "user", "content": shop.question}]


def write(messages: list[dict], **how) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **how)


demonstrations = [write(ask(shop) + run_carelessly(shop)) for shop in (Shop() for _ in range(WARM_UP_RUNS))]
print(f"The author at work:\n\n{demonstrations[0]}")
set_seed(SEED)
model = AutoModelForCausalLM.from_pretrained(CARELESS_MODEL, dtype=torch.float32)
warm_up = SFTConfig(
    str(OUT / "warm-up"), learning_rate=2e-3, lr_scheduler_type="cosine", num_train_epochs=1,
    per_device_train_batch_size=32, logging_steps=50, **ON_A_CPU,
)  # fmt: skip
teacher = SFTTrainer(model, warm_up, train_dataset=Dataset.from_dict({"text": demonstrations}), processing_class=tokenizer)
teacher.train()
teacher.save_model()


# %% The log: runs of the agent as messages, each with a reward.
def parse(text: str) -> dict:
    name, _, argument = text.strip().partition(" ")
    return call(name, argument) if name in ("lookup", "calculate") else {"role": "assistant", "content": text.strip()}


def run_agent(model, shops: list[Shop], folder: Path) -> Dataset:
    """RUNS runs in each shop: turn by turn, until the agent answers without asking a tool."""
    runs = [(n, shop, ask(shop)) for n, shop in enumerate(shops) for _ in range(RUNS)]
    sampling = SamplingArguments(num_generations=1, max_new_tokens=24)
    for turn in range(MOST_TURNS):
        going = [(shop, run) for _, shop, run in runs if run[-1]["role"] != "assistant"]
        prompts = Dataset.from_dict({
            "prompt": [write(run, add_generation_prompt=True) for _, run in going], "problem_id": range(len(going))
        })  # fmt: skip
        said = sample_completions(model, tokenizer, prompts, sampling, seed=SEED + turn, description=f"Turn {turn + 1}")
        for (shop, run), text in zip(going, said["completion"], strict=True):
            run.append(parse(text))
            if "tool_calls" in run[-1]:
                run.append(use_tool(shop, run[-1]))
    rows = [
        {
            "problem_id": n, "prompt": run[:1], "completion": run[1:],
            "reward": 1.0 if run[-1].get("content") == f"The answer is {shop.answer}." else -1.0,
        }
        for n, shop, run in runs
    ]  # fmt: skip
    save_rows(Dataset.from_list(rows), folder)
    return load_rows(folder)


log = run_agent(model, [Shop() for _ in range(LOGGED_PROBLEMS)], OUT / "log")
held_out = [Shop() for _ in range(HELD_OUT_PROBLEMS)]
print(f"\nFrom the log, worth {log[0]['reward']:g}:\n\n{write(log[0]['prompt'] + log[0]['completion'])}")
print(sum(r > 0 for r in log["reward"]) / len(log))
