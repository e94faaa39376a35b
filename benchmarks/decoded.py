"""Accuracy with greedy decoding, sampling and majority vote."""

from datasets import concatenate_datasets
from transformers import PreTrainedModel

from benchmarks.setting import TEST_SEED, VALIDATION_SEED, Profile, problems, sample
from topr_trl import evaluate_rows

GREEDY = "greedy"


def decoded(
    model: PreTrainedModel,
    task: str,
    profile: Profile,
    seed: int,
    samples: int = 16,
    k: int = 8,
    temperature: float = 1.0,
    split: str = "test",
) -> dict[str, float]:
    """Return the accuracy of a model on the test problems of its task.

    Args:
        model: the model.
        task: see `benchmarks.setting`.
        profile: sizes, including the number of problems.
        seed: seed of the samples.
        samples: completions of each problem, in addition to the greedy completion.
        k: number of votes and attempts in maj@k and pass@k.
        temperature: sampling temperature.
        split: `"test"`, or `"validation"` to choose a learning rate.

    Returns:
        `greedy`, `pass@1`, `maj@k` and `pass@k`, each with its standard error under `NAME error`, which is NaN if k
        equals `samples`. `correct`, `incorrect` and `invalid` are shares of the samples.
    """
    questions = problems(task, profile.test_problems, TEST_SEED if split == "test" else VALIDATION_SEED)
    drawn = [
        sample(model, task, questions, 1, seed, temperature=0.0),
        sample(model, task, questions, samples, seed, temperature),
    ]
    found = evaluate_rows(concatenate_datasets(drawn), pass_ks=(1, k), maj_ks=(k,), seed=seed)
    assert found.greedy is not None  # because one completion of each problem has temperature 0
    estimates = {
        GREEDY: found.greedy,
        "pass@1": found.pass_at[1],
        f"maj@{k}": found.maj_at[k],
        f"pass@{k}": found.pass_at[k],
    }
    return {
        **{name: estimate.value for name, estimate in estimates.items()},
        **{f"{name} error": estimate.standard_error for name, estimate in estimates.items()},
        **found.shares,
    }
