"""Train with offline TOPR on logged runs of an agent with tools. See docs/agents.md.

    python examples/agent.py

The script has notebook cells, takes a few minutes on a laptop's CPU, and downloads nothing. The bundled model learns
to call two tools, and its runs are logged as messages. Two copies of the model learn from the log. One copy is trained
without the mask of tokens that the agent wrote.
"""

# %% Settings
import random
import re
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
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
    score_completions,
)
from topr_trl.tasks import gsm8k
from topr_trl.tasks.arithmetic import CARELESS_MODEL

OUT, SEED = Path("topr-agent"), 0
DEMONSTRATIONS, LOGGED_SHOPS, HELD_OUT_SHOPS, RUNS, MOST_TURNS = 12_000, 150, 100, 8, 4
ON_A_CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "optim": "adamw_torch", "seed": SEED,
            "save_strategy": "no", "report_to": "none", "per_device_train_batch_size": 32}  # fmt: skip
rng = random.Random(SEED)


# %% The environment: a shop with random prices and two tools. `price` also returns unrelated prices, like real tools.
class Shop:
    def __init__(self) -> None:
        self.prices = {str(box): rng.randint(2, 30) for box in rng.sample(range(10, 100), 6)}
        self.count, self.box = rng.randint(2, 9), rng.choice(list(self.prices))
        self.question = [{"role": "user", "content": f"Ana gets {self.count} boxes of {self.box}. How many coins?"}]
        self.answer = str(self.count * self.prices[self.box])

    def price(self, box: str) -> str:
        others = ", ".join(f"{n} coins for {other}" for other, n in rng.sample(sorted(self.prices.items()), 3))
        return f"{self.prices[box]} coins. Also {others}." if box in self.prices else "no such box"

    def total(self, of: str) -> str:
        asked = re.fullmatch(r"(\d{1,3}) ([*+]) (\d{1,3})", of)
        x, y = (int(asked[1]), int(asked[3])) if asked else (0, 0)
        return str(x * y if asked and asked[2] == "*" else x + y)

    def use(self, message: dict) -> dict:
        tool = message["tool_calls"][0]["function"]
        return {"role": "tool", "name": tool["name"], "content": getattr(self, tool["name"])(tool["arguments"]["of"])}


def call(name: str, of: str) -> dict:
    called = {"type": "function", "function": {"name": name, "arguments": {"of": of}}}
    return {"role": "assistant", "content": "", "tool_calls": [called]}


# %% A careless author. The model learns from the author to use the tools, and also learns the mistakes.
def run_carelessly(shop: Shop) -> list[dict]:
    box = rng.choice(list(shop.prices)) if rng.random() < 0.2 else shop.box
    first = call("price", box)
    second = call("total", f"{shop.count} {'+' if rng.random() < 0.2 else '*'} {shop.prices[box]}")
    said = shop.use(second)
    answer = int(said["content"]) + (rng.choice((-10, -1, 1, 10)) if rng.random() < 0.2 else 0)
    return [first, shop.use(first), second, said, {"role": "assistant", "content": f"The answer is {answer}."}]


# %% Add a chat template to the bundled model, and train it on the author's runs.
tokenizer = AutoTokenizer.from_pretrained(CARELESS_MODEL)
tokenizer.chat_template = """\
{%- for message in messages %}
{%- if message.role == "assistant" %}{{ "Answer:" }}
{%- for call in message.tool_calls or [] %} {{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }} {{ value }}{% endfor %}{% endfor %}
{%- if message.content %} {{ message.content }}{% endif %}{{ eos_token }}
{%- else %}{{ {"user": "Question: ", "tool": "Tool: "}[message.role] }}{{ message.content }}
{%- endif %}{{ "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "Answer:" }}{% endif %}"""


def write(messages: list[dict], **how) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **how)


shops = (Shop() for _ in range(DEMONSTRATIONS))
demonstrations = Dataset.from_dict({"text": [write(shop.question + run_carelessly(shop)) for shop in shops]})
print(f"The author at work:\n\n{demonstrations['text'][0]}")
warm_up = SFTConfig(str(OUT / "warm-up"), learning_rate=2e-3, lr_scheduler_type="cosine", num_train_epochs=1,
                    logging_steps=50, model_init_kwargs={"dtype": "float32"}, **ON_A_CPU)  # fmt: skip
teacher = SFTTrainer(str(CARELESS_MODEL), warm_up, train_dataset=demonstrations, processing_class=tokenizer)
teacher.train()
teacher.save_model()


# %% The log: RUNS runs per shop as messages, each with a reward.
# A run ends with the first turn without a tool call, or after MOST_TURNS turns.
def run_agent(model, shops: list[Shop], folder: Path) -> Dataset:
    runs = [{"problem_id": n, "shop": shop, "said": []} for n, shop in enumerate(shops) for _ in range(RUNS)]
    sampling, going = SamplingArguments(num_generations=1, max_new_tokens=24), runs
    for turn in range(MOST_TURNS):
        prompts = [write(run["shop"].question + run["said"], add_generation_prompt=True) for run in going]
        turns = Dataset.from_dict({"prompt": prompts, "problem_id": range(len(going))})
        turns = sample_completions(model, tokenizer, turns, sampling, seed=SEED + turn, description=f"Turn {turn + 1}")
        for run, text in zip(going, turns["completion"], strict=True):
            name, _, of = text.strip().partition(" of ")
            answer = {"role": "assistant", "content": text.strip()}
            run["said"].append(call(name, of) if name in ("price", "total") else answer)
        if not (going := [run for run in going if run["said"][-1].get("tool_calls")]):
            break
        for run in going:
            run["said"].append(run["shop"].use(run["said"][-1]))
    rows = [{"problem_id": run["problem_id"], "prompt": run["shop"].question, "completion": run["said"],
             "answer": run["shop"].answer} for run in runs]  # fmt: skip
    save_rows(score_completions(Dataset.from_list(rows), gsm8k.judge), folder)
    return load_rows(folder)


log = run_agent(teacher.model, [Shop() for _ in range(LOGGED_SHOPS)], OUT / "log")
print(f"\nFrom the log, {log[0]['verdict']}:\n\n{write(log[0]['prompt'] + log[0]['completion'])}")


# %% Train two copies on the log: one on the messages, and one on token ids without the mask of the agent's tokens.
def without_mask(row: dict) -> dict:
    prompt = write(row["prompt"], add_generation_prompt=True)
    completion = write(row["prompt"] + row["completion"]).removeprefix(prompt)
    return {"prompt_ids": tokenizer(prompt)["input_ids"], "completion_ids": tokenizer(completion)["input_ids"]}


held_out = [Shop() for _ in range(HELD_OUT_SHOPS)]
results = Evaluations(before=evaluate_rows(run_agent(teacher.model, held_out, OUT / "before")))
for label, rows in (("TOPR", log), ("TOPR, without the mask", log.map(without_mask))):
    folder = OUT / ("trained" if rows is log else "without-mask")
    settings = OfflineTOPRConfig(str(folder), learning_rate=1e-4, logging_steps=10, **ON_A_CPU)
    trainer = OfflineTOPRTrainer(str(OUT / "warm-up"), settings, rows, processing_class=tokenizer)
    print(f"\n{label}: training on {trainer.curated}.")
    trainer.train()
    trainer.save_model()
    results[label] = evaluate_rows(run_agent(trainer.model, held_out, folder / "held-out"))

# %% Results in shops that are not in the log.
print(f"\n{results}\n\nThe log, the runs in other shops and the models are in {OUT}/")
