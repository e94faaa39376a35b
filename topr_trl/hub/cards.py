"""The card of a dataset: what its rows are, and how they were made."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult

from topr_trl.evaluation.estimates import Evaluation
from topr_trl.pipeline.lineage import facts_of_sampling, problems_of, writer_of
from topr_trl.pipeline.manifest import Json
from topr_trl.trainers.model_card import PAPER, TAGS, markdown_table

_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "n>1B")

COLUMNS = {
    "prompt": "what the model was asked",
    "completion": "what the model wrote",
    "reward": "the reward of the completion",
    "reward_after_baseline": "the reward minus the baseline in rows that were chosen for training; empty in the others",
    "label": "true where the completion is good: a reward of +1, otherwise -1",
    "prompt_ids": "token ids of the prompt",
    "completion_ids": "token ids of the completion, including its stop token",
    "completion_mask": "1 for tokens of `completion_ids` that the model wrote, 0 for what it read in between",
    "problem_id": "the problem; rows with the same id are completions for the same problem",
    "rollout_id": "rows with the same id are parts of one trajectory, with one reward",
    "sample_id": "position in the order in which the problem's completions were drawn",
    "finish_reason": "`stop`, or `length` where the completion was cut off",
    "sampler_logps": "log-probability of each token, as the sampler reported it while it wrote",
    "temperature": "temperature at which the completion was sampled; 0 for a greedy completion",
    "top_p": "share of the probability that was sampled from",
    "top_k": "number of tokens that were sampled from",
    "logprobs_mode": "whether `sampler_logps` are the model's own (raw) or after temperature and filters (processed)",
    "mu_logps": "log μ of each token or of the completion, under the model that wrote it; empty if not needed",
    "mu_fingerprint": "fingerprint of the model that computed `mu_logps`",
    "answer": "the right answer, in normal form",
    "extracted": "the answer that was found in the completion, in normal form; empty if there is none",
    "verdict": "`correct`, `incorrect`, or `invalid` if there is no answer",
    "score": "a verifier's score of the completion",
    "question": "the problem without the prompt around it",
    "solution": "a worked solution of the problem",
    "subject": "the problem's subject",
    "level": "the problem's difficulty",
    "tools": "for the chat template",
    "chat_template_kwargs": "for the chat template",
}


def results_metadata(evaluation: Evaluation, dataset: str) -> list[EvalResult]:
    """The results of an evaluation for a model card's metadata; `dataset` is the problems' name on the Hub."""
    curves = {"pass": evaluation.pass_at, "maj": evaluation.maj_at}
    found = {"greedy": evaluation.greedy} if evaluation.greedy else {}
    found |= {f"{measure}@{k}": estimate for measure, curve in curves.items() for k, estimate in curve.items()}
    return [
        EvalResult(
            task_type="text-generation", dataset_type=dataset, dataset_name=dataset, dataset_split="test",
            metric_type=measure, metric_value=round(100 * estimate.value, 2),
        )
        for measure, estimate in found.items()
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
    """The card of a dataset of rows.

    Args:
        columns: names and types.
        counts: names and counts, for a table.
        num_rows: of all files together.
        files: the name or pattern of the files of rows; readers load these and nothing else.
        sampling: see `topr_trl.pipeline.lineage.sampling_of`.
        mu_fingerprints: of the models that computed log μ.
    """
    split, made = sampling.get("split", "train"), facts_of_sampling(sampling)
    if mu_fingerprints:
        made["fingerprint of μ"] = ", ".join(f"`{fingerprint}`" for fingerprint in mu_fingerprints)
    size = _SIZES[min(max(len(str(num_rows)) - 3, 0), len(_SIZES) - 1)]
    trajectories = counts.get("trajectories")
    what = f"{num_rows:,} rows of {trajectories} trajectories" if trajectories else f"{num_rows:,} completions"
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
        size=f"{what} for {counts['problems']} problems",
        problems=problems_of(sampling),
        sampler=writer_of(sampling),
        split=split,
        trainable=bool({"reward", "label"} & set(columns)) and not sampling.get("greedy"),
        judged="verdict" in columns,
        counts=markdown_table(("what", "count"), counts.items()),
        columns=markdown_table(["column", "type", "meaning"], rows),
        made=markdown_table(("setting", "value"), made.items()) if made else None,
        citation=PAPER["citation"],
    )
    return card
