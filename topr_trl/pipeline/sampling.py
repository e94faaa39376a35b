"""The stage `sample`: completions of problems, shard by shard."""

from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from topr_trl.data.tables import shard_path
from topr_trl.generation.transformers import sample_completions
from topr_trl.generation.vllm import sample_completions_with_vllm, start_engine
from topr_trl.pipeline.arguments import SampleArguments, seed_of
from topr_trl.pipeline.models import load_tokenizer, loading, model_path
from topr_trl.pipeline.problems import load_problems
from topr_trl.pipeline.shards import Made, count_rows, write_shard


def sample(args: SampleArguments) -> Made:
    """Completions of the problems, `problems_per_shard` problems per shard."""
    draw_shards(args)
    return count_rows(args.folder), {}


def shard_count(args: SampleArguments, problems: Dataset) -> int:
    """How many shards hold the completions of these problems."""
    return -(-len(problems) // args.problems_per_shard)


def own_shards(worker: str | None, count: int) -> range:
    """Return the numbers of all shards, or of a worker's share."""
    first, step = map(int, (worker or "0/1").split("/"))
    return range(first, count, step)


def missing_shards(folder: Path, own: range, count: int) -> list[int]:
    """Return the numbers of shards that are missing."""
    return [k for k in own if not shard_path(folder, k, count).is_file()]


def draw_shards(args: SampleArguments) -> None:
    """The shards that are missing: all, or those of this worker."""
    folder, problems = args.folder, load_problems(args, args.split)
    count = shard_count(args, problems)
    own = own_shards(args.worker, count)
    missing = missing_shards(folder, own, count)
    if not missing:
        return
    draw = _sampler(args)
    progress = {"desc": f"Sampling {args.split} problems", "unit": "shard", "initial": len(own) - len(missing)}
    for k in tqdm(missing, total=len(own), **progress):
        start = k * args.problems_per_shard
        part = problems.select(range(start, min(start + args.problems_per_shard, len(problems))))
        rows = draw(part, seed_of("sample", args.seed, args.iteration, args.split, k))
        write_shard(rows.with_format("arrow")[:], shard_path(folder, k, count), {"sample": []})


def _sampler(args: SampleArguments) -> Callable[[Dataset, int], Dataset]:
    stops = args.task_of_problems.stop_strings
    if args.sampling_backend == "vllm":
        engine = start_engine(model_path(args), args, args.seed, args.model_revision, args.trust_remote_code)
        return lambda problems, seed: sample_completions_with_vllm(engine, problems, args, stops, seed)
    model = AutoModelForCausalLM.from_pretrained(model_path(args), **loading(args)).to(PartialState().device)
    tokenizer = load_tokenizer(args)
    return lambda problems, seed: sample_completions(model, tokenizer, problems, args, stops, seed, "Sampling a shard")
