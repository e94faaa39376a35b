"""Train with custom prompts and custom rewards, in a loop that uses the public API.

Without arguments, the script trains the bundled model for a minute on a laptop's CPU. This model only knows arithmetic.
It learns to answer greetings briefly, and in words.

    python examples/own_rewards.py

The script writes its prompts to `own-rewards/`. With these prompts, `topr iterate` does the same. The command can also
continue after a crash, and use several GPUs:

    topr iterate --dataset_name own-rewards/prompts.jsonl --test_dataset_name own-rewards/test-prompts.jsonl \\
        --reward_funcs examples/own_rewards.py:in_words examples/own_rewards.py:ends --reward_weights 1 0.5 \\
        --max_new_tokens 32 --iterations 4 --output_dir own-run

With a different model: `python examples/own_rewards.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct`.
"""

import argparse
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, SamplingArguments, reward_completions, sample_completions
from topr_trl.tasks import arithmetic

NAMES = ("Ana", "Ben", "Cleo", "Dora", "Emil", "Finn", "Gita", "Hugo", "Ines", "Jan", "Kim", "Lars", "Mira", "Nils")
GREETINGS = ("Say hello to {}.", "Wish {} a good morning.", "Thank {} for the cake.", "Invite {} to dinner.")
LONGEST = 32  # tokens


def in_words(completions, **kwargs):
    """Return the share of letters among the characters of each completion."""
    return [sum(character.isalpha() for character in text) / max(len(text), 1) for text in completions]


async def ends(completion_ids, **kwargs):
    """Return 1 for a completion that ends by itself. The function is asynchronous, so it could call a server."""
    return [float(len(ids) < LONGEST) for ids in completion_ids]


def main(model_name: str, out: Path, iterations: int, num_generations: int) -> None:
    prompts = [{"prompt": f"{text.format(name)}\nAnswer:", "name": name} for name in NAMES for text in GREETINGS]
    train, test = Dataset.from_list(prompts[8:]), Dataset.from_list(prompts[:8])
    train.to_json(out / "prompts.jsonl")
    test.to_json(out / "test-prompts.jsonl")

    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    sampling = SamplingArguments(num_generations=num_generations, max_new_tokens=LONGEST)

    def sample(problems: Dataset, seed: int) -> Dataset:
        rows = sample_completions(model, tokenizer, problems, sampling, seed=seed)
        return reward_completions(rows, [in_words, ends], [1.0, 0.5])

    def test_now(name: str) -> str:
        rows = sample(test, seed=0)
        return f"{name}: mean reward {sum(rows['reward']) / len(rows):.3f}, for example {rows[0]['completion']!r}"

    results = [test_now("before")]
    settings = {"learning_rate": 1e-4, "per_device_train_batch_size": 16, "bf16": False, "report_to": "none",
                "gradient_checkpointing": False, "save_strategy": "no", "disable_tqdm": True}  # fmt: skip
    for iteration in range(1, iterations + 1):
        rows = sample(train, seed=iteration)
        args = OfflineTOPRConfig(str(out / f"model-{iteration}"), **settings)
        trainer = OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer)
        trainer.train()
        trainer.save_model()
        results.append(test_now(f"after {iteration}"))
    print(*results, f"The models are in {out}/.", sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model_name_or_path", default=str(arithmetic.CARELESS_MODEL), help="Default: bundled.")
    parser.add_argument("--output_dir", type=Path, default=Path("own-rewards"), help="Folder to write.")
    parser.add_argument("--iterations", type=int, default=4, help="Iterations: sample, then train.")
    parser.add_argument("--num_generations", type=int, default=16, help="Completions per prompt.")
    given = parser.parse_args()
    given.output_dir.mkdir(parents=True, exist_ok=True)
    main(given.model_name_or_path, given.output_dir, given.iterations, given.num_generations)
