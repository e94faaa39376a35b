"""Write dataset cards, and the evaluation results for model cards."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult

from topr_trl.data.rows import have_rewards
from topr_trl.evaluation.estimates import Evaluation
from topr_trl.pipeline.lineage import facts_of_sampling, problems_of, writer_of
from topr_trl.pipeline.manifest import Json
from topr_trl.trainers.model_card import PAPER, TAGS, markdown_table

# Size categories of the Hub: below 1,000 rows, one per power of ten, and above a billion rows.
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "n>1B")

COLUMNS = {
    "prompt": "prompt that the model completed",
    "completion": "completion that the model wrote",
    "reward": "reward of the completion",
    "reward_after_baseline": "reward minus baseline in the rows chosen for training; null in the others",
    "times_chosen": "how often each epoch trains on the row; 0 if it was not chosen",
    "label": "true for a good completion (reward +1), false for a bad one (reward -1)",
    "prompt_ids": "token ids of the prompt",
    "completion_ids": "token ids of the completion, including its stop token",
    "completion_mask": "1 for tokens of `completion_ids` that the model wrote, 0 for context between the model's turns",
    "problem_id": "id of the problem, the same for all of its completions",
    "rollout_id": "id of the trajectory; all of its rows have the same reward",
    "sample_id": "position in the sampling order of the problem's completions",
    "finish_reason": "`stop`, or `length` if the completion was cut off",
    "sampler_logps": "log-probability of each token, as the sampler reported it",
    "temperature": "sampling temperature; 0 for a greedy completion",
    "top_p": "top-p in sampling; 1 keeps all tokens",
    "top_k": "top-k in sampling",
    "logprobs_mode": "whether `sampler_logps` are from before (raw) or after (processed) temperature and filters",
    "mu_logps": "log μ of each token or of the completion, under the model that wrote it; null if not needed",
    "mu_fingerprint": "fingerprint of the model that computed `mu_logps`",
    "answer": "correct answer, in normal form",
    "extracted": "answer found in the completion, in normal form; null if there is none",
    "verdict": "`correct`, `incorrect`, or `invalid` if there is no answer",
    "score": "score that a verifier gave the completion",
    "question": "problem without the rest of the prompt",
    "solution": "worked solution of the problem",
    "subject": "subject of the problem",
    "level": "difficulty of the problem",
    "model": "model that wrote the completion, by the name in the request",
    "served_model": "model that wrote the completion, by the name in the answer",
    "model_revision": "revision of the model that wrote the completion",
    "tools": "tools for the chat template",
    "chat_template_kwargs": "arguments for the chat template",
}


def results_metadata(evaluation: Evaluation, dataset: str) -> list[EvalResult]:
    """Return the results of an evaluation for the metadata of a model card.

    Args:
        evaluation (`Evaluation`): Evaluation of the model.
        dataset (`str`): Name on the Hub of the dataset of test problems.
    """
    curves = {"pass": evaluation.pass_at, "maj": evaluation.maj_at}
    found = {"greedy": evaluation.greedy} if evaluation.greedy else {}
    found |= {f"{measure}@{k}": estimate for measure, curve in curves.items() for k, estimate in curve.items()}
    values = {measure: round(100 * estimate.value, 2) for measure, estimate in found.items()}
    rewards = {"reward": evaluation.reward, "greedy reward": evaluation.greedy_reward}
    values |= {measure: round(estimate.value, 4) for measure, estimate in rewards.items() if estimate}
    return [
        EvalResult(
            task_type="text-generation", dataset_type=dataset, dataset_name=dataset, dataset_split="test",
            metric_type=measure, metric_value=value,
        )
        for measure, value in values.items()
    ]  # fmt: skip


def dataset_card(
    repo_id: str,
    columns: Mapping[str, str],
    counts: Mapping[str, str],
    num_rows: int,
    files: str,
    sampling: Json,
    mu_fingerprints: Sequence[str],
) -> DatasetCard:
    """Return a dataset card.

    Args:
        repo_id (`str`): Repository on the Hub.
        columns (`Mapping[str, str]`): Type of each column.
        counts (`Mapping[str, str]`): Counts as text, by name, as `Counts.facts` returns them. The card shows them in a
            table.
        num_rows (`int`): Number of rows in all files.
        files (`str`): Name or pattern of the files that `load_dataset` reads.
        sampling (`dict`): Inputs of the stage `sample`, see `topr_trl.pipeline.lineage.sampling_of`.
        mu_fingerprints (`Sequence[str]`): Fingerprints of the models that computed log μ.
    """
    split, made = sampling.get("split", "train"), facts_of_sampling(sampling)
    if mu_fingerprints:
        made["fingerprint of μ"] = ", ".join(f"`{fingerprint}`" for fingerprint in mu_fingerprints)
    size = _SIZES[min(max(len(str(num_rows)) - 3, 0), len(_SIZES) - 1)]
    trajectories = counts.get("trajectories")
    rows_text = f"{num_rows:,} rows of {trajectories} trajectories" if trajectories else f"{num_rows:,} completions"
    data = DatasetCardData(
        pretty_name=repo_id.rpartition("/")[2],
        task_categories=["text-generation"],
        size_categories=[size],
        tags=list(TAGS),
        configs=[{"config_name": "default", "data_files": [{"split": split, "path": files}]}],
    )
    rows = [[f"`{name}`", f"`{kind}`", COLUMNS.get(name, "")] for name, kind in columns.items()]
    card: DatasetCard = DatasetCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("dataset_card.md")),
        name=data.pretty_name,
        repo_id=repo_id,
        size=f"{rows_text} for {counts['problems']} problems",
        problems=problems_of(sampling),
        sampler=writer_of(sampling),
        split=split,
        trainable=have_rewards(columns) and not sampling.get("greedy"),
        judged="verdict" in columns,
        counts=markdown_table(("property", "value"), counts.items()),
        columns=markdown_table(["column", "type", "meaning"], rows),
        made=markdown_table(("setting", "value"), made.items()) if made else None,
        citation=PAPER["citation"],
    )
    return card
