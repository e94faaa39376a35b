"""Prepare models for the Hub: weights as safetensors, other files that loading the model needs, and a card."""

import json
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import httpx

from topr_trl.data.tables import from_table, read_shard
from topr_trl.evaluation.estimates import Evaluation
from topr_trl.evaluation.report import EVALUATION, PICTURE, Evaluations, read_evaluation
from topr_trl.hub.upload import README, Upload
from topr_trl.pipeline import manifest
from topr_trl.pipeline.lineage import (
    facts_of_sampling,
    first_weights,
    lineage,
    name_on_the_hub,
    problems_of,
    sampling_of,
    stage_folder,
    weights_of,
)
from topr_trl.pipeline.manifest import Entry, Json
from topr_trl.pipeline.model_loading import ADAPTER
from topr_trl.pipeline.run_folders import iteration_folder, results_folder
from topr_trl.pipeline.stages.curate import CHOICE
from topr_trl.settings.shared import TOPRArguments
from topr_trl.trainers.checkpoints import STATE, check_files, is_whole_checkpoint
from topr_trl.trainers.model_card import adapt, add_section, model_card, training_facts

MODEL_CONFIGS = ("config.json", "adapter_config.json")
# Files that `save_pretrained` writes. Only these files, custom code of the model, and the card and its plot are pushed.
_WANTED = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json", "generation_config.json",
    "*processor_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.model", "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip


def holds_model(folder: Path) -> bool:
    """Return whether a folder holds a model or an adapter."""
    return any((folder / name).is_file() for name in MODEL_CONFIGS)


def pack_model(folder: Path, repo_id: str, before: str | Path | None, after: str | Path | None) -> Upload:
    """Prepare a model or a checkpoint for a model repository.

    Args:
        folder (`Path`): Folder of the model.
        repo_id (`str`): Repository on the Hub.
        before (`str` or `Path`, *optional*): Results of `topr evaluate` for the model before training: a folder or its
            JSON file. If `before` and `after` are both `None`, the loop's results for this model are used, if any.
        after (`str` or `Path`, *optional*): Results of `topr evaluate` for the model after training.

    Returns:
        [`Upload`]: the files to push.

    Raises:
        ValueError: weights are missing, damaged or pickled, or the checkpoint is incomplete; the results are for
            different numbers of problems; or neither a manifest nor a card says how the model was trained.
        FileNotFoundError: there are no results in `before` or `after`.
    """
    folder = folder.resolve()  # The names of the folder and of its parents tell what it is.
    files = _files_of(folder)
    card = _card_of(folder, repo_id)
    results, sampling = _results(folder, before, after)
    evaluations = {name: _read_evaluation(path) for name, path in results.items()}
    sizes = sorted({evaluation.num_problems for evaluation in evaluations.values()})
    if len(sizes) > 1:
        raise ValueError(
            f"The results before and after training are for {sizes[0]} and {sizes[1]} problems. Evaluate both on the "
            "same problems."
        )
    if evaluations:
        dataset = name_on_the_hub(sampling.get("test_dataset_name") or sampling.get("dataset_name"))
        if sampling.get("num_test_problems"):
            dataset = None  # The metadata is only for results on the whole split.
        how = f"{problems_of(sampling)}, temperature {sampling['temperature']:g}" if sampling else None
        with TemporaryDirectory() as aside:
            add_section(card, Evaluations(evaluations).write_card_section(Path(aside), how))
            if (drawn := Path(aside) / PICTURE).is_file():
                files[PICTURE] = drawn.read_bytes()
        if dataset:
            card.data.eval_results = results_metadata(list(evaluations.values())[-1], dataset)
    elif PICTURE in card.text:
        files[PICTURE] = _readme_of(folder).with_name(PICTURE).read_bytes()
    files[README] = str(card).encode()
    return Upload(folder, "model", files, _WANTED)


def _files_of(folder: Path) -> dict[str, Path | bytes]:
    """Return the files needed to load a model.

    Raises:
        ValueError: the checkpoint is incomplete, or weights are pickled, missing or damaged.
    """
    if _is_checkpoint(folder) and not is_whole_checkpoint(folder):
        raise ValueError(
            f"{folder} is incomplete: {STATE}, the last file of a checkpoint, is missing or truncated. Push a "
            "different checkpoint."
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(
            f"{folder} holds no weights as safetensors. Load the model and save it with save_pretrained. If "
            "the weights are shards of FSDP or DeepSpeed, merge them first."
        )
    for index in folder.glob("*.safetensors.index.json"):
        needed = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(needed - {path.name for path in weights}):
            raise ValueError(
                f"{folder} lacks {len(missing)} of {len(needed)} weight files, such as {missing[0]}. Save the "
                "model again."
            )
    check_files(folder)
    adapter = folder / "adapter_config.json"
    base = json.loads(adapter.read_text()).get("base_model_name_or_path") if adapter.is_file() else None
    if base and name_on_the_hub(base) is None:
        raise ValueError(
            f"{adapter} has the base model {base}, which others cannot load. Push the merged model instead, or push "
            "the base model and write its id on the Hub as base_model_name_or_path."
        )
    configs = [path for name in ("config.json", "tokenizer_config.json") if (path := folder / name).is_file()]
    has_own_code = any("auto_map" in json.loads(path.read_text()) for path in configs)
    patterns = (*_WANTED, "*.py") if has_own_code else _WANTED
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): path for path in sorted(found)}


def _is_checkpoint(folder: Path) -> bool:
    return folder.name.startswith("checkpoint-") or folder.name == "last-checkpoint"


def _readme_of(folder: Path) -> Path:
    """Return the path of the card that the trainer wrote.

    For a checkpoint, return the card in the parent folder, because PEFT writes an empty template into checkpoints.
    """
    return (folder.parent if _is_checkpoint(folder) else folder) / README


def _card_of(folder: Path, repo_id: str) -> ModelCard:
    """Return a card. Make it from the manifests if the stage `train` trained the model, else adapt the trainer's card.

    Raises:
        ValueError: there is neither a manifest of `train` nor a card.
    """
    steps, readme = lineage(stage_folder(folder)), _readme_of(folder)
    if "train" in steps:
        return _card_of_stage(folder, repo_id, steps)
    if not readme.is_file():
        raise ValueError(
            f"How {folder} was trained is not known: there is no {readme}. Write this file with "
            "trainer.create_model_card(), or write your own card."
        )
    card: ModelCard = ModelCard.load(readme)
    adapt(card, repo_id, _last_step(folder) if _is_checkpoint(folder) else None)
    return card


def _card_of_stage(folder: Path, repo_id: str, steps: dict[str, Entry]) -> ModelCard:
    inputs, stage = steps["train"]["inputs"], stage_folder(folder)
    sampling, chosen = sampling_of(stage), steps.get("curate")
    known = {field.name: inputs[field.name] for field in fields(TOPRArguments) if field.name in inputs}
    # The entry of an unfinished training has no number of rows.
    rows = f"{steps['train']['rows']:,}" if "rows" in steps["train"] else "not counted yet"
    if chosen:
        known |= {name: chosen["inputs"][name] for name in CHOICE}
        rows = chosen["curated"]
    last_step = _last_step(folder if (folder / STATE).is_file() else stage)
    facts = {
        **training_facts(TOPRArguments(**known), rows, last_step, offline=True),
        "seed": f"{inputs['seed']}, iteration {inputs['iteration']}",
    }
    shown_elsewhere = ("prompt", "seed", "sampled with")
    facts |= {name: fact for name, fact in facts_of_sampling(sampling).items() if name not in shown_elsewhere}
    problems = name_on_the_hub(sampling.get("dataset_name"))
    is_public = bool(sampling) and (sampling["dataset_name"] is None or _is_public(problems))
    data = ModelCardData(
        base_model=name_on_the_hub(first_weights(stage).get("model")),
        datasets=[problems] if problems else None,
        library_name="peft" if (folder / "adapter_config.json").is_file() else "transformers",
        model_name=repo_id.rpartition("/")[2],
        pipeline_tag="text-generation",
    )
    return model_card(
        data, repo_id, facts, problems=problems_of(sampling), prompt=_example_prompt(stage) if is_public else None,
        max_new_tokens=sampling.get("max_new_tokens"), is_float32=_is_float32(folder),
    )  # fmt: skip


def _is_public(dataset: str | None) -> bool:
    """Return whether everybody can read a dataset on the Hub. Return False if the Hub cannot be reached."""
    try:
        info = HfApi().dataset_info(dataset, token=False, timeout=10) if dataset else None
    except (OSError, httpx.HTTPError):
        return False
    return info is not None and not (info.private or info.gated)


def _is_float32(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and json.loads(config.read_text()).get("dtype") == "float32"


def _last_step(folder: Path) -> int:
    return int(json.loads((folder / STATE).read_text())["global_step"])


def _example_prompt(model: Path) -> Any:
    """Return the first prompt in the folder `rollouts` beside the model. Return None if there is no prompt."""
    shards = (from_table(read_shard(path, ["prompt"])) for path in sorted(model.parent.glob("rollouts/*.parquet")))
    return next((rows[0]["prompt"] for rows in shards if len(rows)), None)


def _results(folder: Path, before: str | Path | None, after: str | Path | None) -> tuple[dict[str, Path], Json]:
    """Return the folders of the results `before` and `after` training, and the inputs of the stage `sample`.

    If `before` or `after` is given, return the given folders, and {} as the inputs. Otherwise, use the results of the
    loop if its manifests show that the results are for these weights. If not, return {} twice.
    """
    given = {name: Path(path) for name, path in (("before", before), ("after", after)) if path}
    if given:
        return given, {}
    folder = stage_folder(folder) if folder.name == ADAPTER else folder
    own, base = (results_folder(each) for each in (folder.parent, iteration_folder(folder.parent.parent, 0)))
    sampling, sampling_before = sampling_of(own), sampling_of(base)
    if not sampling or weights_of(sampling) != {"weights": manifest.fingerprint(folder)}:
        return {}, {}
    if sampling_before and weights_of(sampling_before) == first_weights(folder):
        return {"before": base, "after": own}, sampling
    return {"after": own}, sampling


def _read_evaluation(path: Path) -> Evaluation:
    file = path / EVALUATION if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file}. Set --before and --after to folders that topr evaluate wrote.")
    return read_evaluation(file)


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
