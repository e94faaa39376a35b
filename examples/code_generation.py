"""Train with offline TOPR on logged programs, which unit tests score in a sandbox. See docs/examples.md.

    python examples/code_generation.py

The script has notebook cells, takes a few minutes on a laptop's CPU, and downloads nothing. A tiny model learns to
write one-line functions from a careless author. The model's programs are logged and tested, and two copies of the
model learn from this log.
"""

# %% Settings
import random
from itertools import product
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
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
from topr_trl.sandbox import run_tests

OUT, SEED = Path("topr-code"), 0
WARM_UP_ROWS, LOGGED_TASKS, HELD_OUT_TASKS, COMPLETIONS = 24_000, 300, 200, 16
ON_A_CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "optim": "adamw_torch", "seed": SEED,
            "save_strategy": "no", "report_to": "none"}  # fmt: skip

# %% 2,700 tasks: each selects numbers of a list, changes each number, and returns a result.
WHICH = [("even", "x % 2 == 0"), ("odd", "x % 2 == 1")]
WHICH += [(f"above {n}", f"x > {n}") for n in range(1, 10)]
WHICH += [(f"below {n}", f"x < {n}") for n in range(1, 10)]
WHICH += [(f"divisible by {n}", f"x % {n} == 0") for n in range(3, 10)]
EACH = [(f"{name} {n}", f"x {sign} {n}") for name, sign in (("plus", "+"), ("minus", "-"), ("times", "*"))
        for n in range(2, 10)] + [("squared", "x ** 2")]  # fmt: skip
RETURNED = [("sum", "sum({})"), ("list", "[{}]"), ("set", "{{{}}}"), ("sorted list", "sorted({})")]


def prompt_of(which, each, returned) -> str:
    return f"# the {returned[0]} of the numbers that are {which[0]}, each {each[0]}\n"


def program_of(which, each, returned) -> str:
    return f"def f(xs): return {returned[1].format(f'{each[1]} for x in xs if {which[1]}')}"


def make_task(problem_id: int, parts) -> dict:
    """Return a task with its prompt, and with unit tests in the column `answer`."""
    right: dict = {}
    exec(program_of(*parts), right)  # a trusted program; the model's programs only run in the sandbox
    lists = [[rng.randint(-20, 20) for _ in range(8)] for _ in range(4)]
    tests = [f"assert f({xs}) == {right['f'](xs)}" for xs in lists]
    return {"problem_id": problem_id, "prompt": prompt_of(*parts), "answer": "\n".join(tests)}


rng = random.Random(SEED)
combinations = list(product(WHICH, EACH, RETURNED))
rng.shuffle(combinations)
tasks = [make_task(i, parts) for i, parts in enumerate(combinations[: HELD_OUT_TASKS + LOGGED_TASKS])]
held_out, logged = Dataset.from_list(tasks[:HELD_OUT_TASKS]), Dataset.from_list(tasks[HELD_OUT_TASKS:])
print(f"One of {len(combinations)} tasks, a correct program, and its tests:\n")
print(f"{tasks[0]['prompt']}{program_of(*combinations[0])}\n\n{tasks[0]['answer']}\n")
run_tests([program_of(*combinations[0])], [tasks[0]["answer"]])  # Without Linux, the script ends here.


# %% A careless author. The model learns from the author to write functions, and also learns the mistakes.
def write_carelessly(parts) -> dict:
    """Return a prompt and a program. Each part may be wrong, and the last bracket may be missing."""
    written = [rng.choice(kinds) if rng.random() < 0.2 else part
               for part, kinds in zip(parts, (WHICH, EACH, RETURNED), strict=True)]  # fmt: skip
    program = program_of(*written)
    return {"prompt": prompt_of(*parts), "completion": program[:-1] if rng.random() < 0.1 else program}


demonstrations = [write_carelessly(rng.choice(combinations[HELD_OUT_TASKS:])) for _ in range(WARM_UP_ROWS)]

# %% Train a tiny model and its tokenizer on the author's programs.
set_seed(SEED)
end, pad, alphabet = "<|end|>", "<|pad|>", pre_tokenizers.ByteLevel.alphabet()
bpe = Tokenizer(models.BPE())
digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence([digits, words]), decoders.ByteLevel()
bpe.train_from_iterator(
    [row["prompt"] + row["completion"] for row in demonstrations[:2_000]],
    trainers.BpeTrainer(vocab_size=400, special_tokens=[end, pad], initial_alphabet=alphabet),
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, pad_token=pad)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
)  # fmt: skip
warm_up = SFTConfig(
    str(OUT / "warm-up"), learning_rate=3e-3, lr_scheduler_type="cosine", num_train_epochs=1,
    per_device_train_batch_size=64, logging_steps=100, **ON_A_CPU,
)  # fmt: skip
teacher = SFTTrainer(model, warm_up, train_dataset=Dataset.from_list(demonstrations), processing_class=tokenizer)
teacher.train()
teacher.save_model()


# %% The log: the model's programs, tested in the sandbox and saved to files.
def write_and_test(model, problems: Dataset, folder: Path, what: str) -> Dataset:
    sampling = SamplingArguments(num_generations=COMPLETIONS, max_new_tokens=48)
    rows = sample_completions(model, tokenizer, problems, sampling, seed=SEED, description=what)
    save_rows(score_completions(rows, run_tests, "Testing"), folder)
    return load_rows(folder)


log = write_and_test(model, logged, OUT / "log", "Writing the log")
print(f"\nFrom the log, for the task {log['prompt'][0].strip()!r}:")
for row in log.select(range(min(6, COMPLETIONS))):
    print(f"  {row['verdict']:<9}  {row['completion']}")

# %% Train two copies on the log: one only on correct programs, and one with TOPR on correct and wrong programs.
results = Evaluations(before=evaluate_rows(write_and_test(model, held_out, OUT / "before", "Writing, before")))
for label, preset in (("positives only", "positives_only"), ("TOPR", "topr")):
    settings = OfflineTOPRConfig(
        str(OUT / preset), preset=preset, learning_rate=3e-4, per_device_train_batch_size=32,
        per_device_eval_batch_size=128, logging_steps=50, **ON_A_CPU,
    )  # fmt: skip
    copy = LlamaForCausalLM.from_pretrained(OUT / "warm-up")
    trainer = OfflineTOPRTrainer(copy, settings, log, processing_class=tokenizer)
    print(f"\n{label}: training on {trainer.curated}.")
    trainer.train()
    trainer.save_model()
    rows = write_and_test(trainer.model, held_out, OUT / preset / "held-out", f"Writing, {label}")
    results[label] = evaluate_rows(rows)

# %% Results on tasks that are neither in the demonstrations nor in the log.
print(f"\n{results}\n\nThe log, the programs for the held-out tasks and the models are in {OUT}/")
