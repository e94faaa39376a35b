"""Sample completions for problems."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from tqdm.auto import tqdm
from trl import ModelConfig

from topr_trl.data.tables import shard_path
from topr_trl.generation.settings import SamplingArguments, encode_prompts
from topr_trl.generation.transformers import sample_completions
from topr_trl.generation.vllm import sample_completions_with_vllm, start_engine
from topr_trl.pipeline import locks, manifest
from topr_trl.pipeline.manifest import Json
from topr_trl.pipeline.model_loading import adapter_of, load_model, load_tokenizer, loading, model_path
from topr_trl.pipeline.problems import load_problems, stop_strings_of
from topr_trl.pipeline.settings import (
    ADAPTER_SETTINGS,
    SPLITS,
    BackendArguments,
    FolderArguments,
    ProblemArguments,
    SeedArguments,
    field_names,
    seed_of,
    validate_model,
)
from topr_trl.pipeline.shards import count_rows, write_shard
from topr_trl.pipeline.stage import Result, Stage
from topr_trl.pipeline.stage_inputs import absolute, values_of, weights_read
from topr_trl.settings.checks import check_at_least, check_choice
from topr_trl.trainers.checkpoints import check_files

_INPUTS = ("num_generations", "greedy", "temperature", "top_p", "top_k", "max_new_tokens", "sampling_backend",
           "split", "num_shots", "training_shots", "problems_per_shard", "seed", "iteration")  # fmt: skip


@dataclass
class SampleArguments(
    FolderArguments, SeedArguments, ModelConfig, ProblemArguments, SamplingArguments, BackendArguments
):
    """Settings of `topr sample`, and of `topr evaluate` when it samples."""

    split: str = field(default="train", metadata={"help": "Problems to sample.", "choices": SPLITS})
    worker: str | None = field(
        default=None, metadata={"help": "Sample only a share of the shards: k/n samples shards k, k + n, ..."}
    )
    use_cpu: bool = field(default=False, metadata={"help": "Sample on the CPU."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Allow running code that comes with the model."})

    def __post_init__(self) -> None:
        validate_model(self, whole=False)
        ProblemArguments.__post_init__(self)
        SamplingArguments.__post_init__(self)
        BackendArguments.__post_init__(self)
        check_choice(self, split=SPLITS)
        if self.split == "test":
            self.check_test_split()
            check_at_least(1, self, "num_test_problems")
        check_at_least(0, self, "iteration")
        if self.sampling_backend == "vllm" and (self.load_in_4bit or self.load_in_8bit):
            raise ValueError(
                "vLLM does not use load_in_4bit and load_in_8bit. Remove them, or set sampling_backend='transformers'."
            )
        if self.worker is not None:
            k, _, n = self.worker.partition("/")
            if not (k.isdecimal() and n.isdecimal() and int(k) < int(n)):
                raise ValueError(f"worker must be k/n with k < n, as in 0/8, not {self.worker!r}.")


class Sample(Stage[SampleArguments]):
    """Stage that samples completions, `problems_per_shard` problems per shard. Existing shards are kept."""

    settings = SampleArguments
    outcome = "Completions in {folder}/: {rows:,}."
    order = 0
    runs_apart = True

    def __init__(self, args: SampleArguments) -> None:
        super().__init__(args)
        # A loop creates all stages when it starts. With these hashes, a stage that runs later detects changed files.
        self._files = self._fingerprints()

    def _fingerprints(self) -> list[str]:
        """Return the fingerprints of the files of problems. A dataset on the Hub is identified only by its name."""
        names = (self.args.dataset_name, self.args.test_dataset_name if self.args.split == "test" else None)
        return [manifest.fingerprint(Path(name)) for name in names if name and Path(name).exists()]

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Return the names of all settings except `input` and the settings of adapters."""
        return field_names(SampleArguments, without=("input", *ADAPTER_SETTINGS))

    def sources(self) -> dict[str, Path]:
        """Return {}, because problems are checked when they are loaded."""
        return {}

    def inputs(self) -> Json:
        """Return the problems, the weights and the sampling settings.

        Raises:
            ValueError: a file of problems has changed since the loop started.
        """
        args = self.args
        if self._fingerprints() != self._files:
            raise ValueError(
                f"The problems of {self.folder} have changed since this run started. Undo the change and run the same "
                "command again, or use another output_dir."
            )
        names = {*_INPUTS, f"num_{args.split}_problems"}
        # vLLM forms its own batches, so the batch size matters only for transformers.
        names.add("vllm_dtype" if args.sampling_backend == "vllm" else "sampling_batch_size")
        data = values_of(args, ("dataset_name", *(["test_dataset_name"] if args.split == "test" else [])))
        return {
            "task": args.task_of_problems.name,
            **values_of(args, sorted(names)),
            # A file can be moved, so its folder does not count.
            **{name: Path(value).name if isfile(value or "") else absolute(value) for name, value in data.items()},
            **({"problems": self._files} if self._files else {}),
            **weights_read(args),
        }

    def run(self) -> Json:
        """Run the stage, or the share of one worker. The last worker finishes the stage. Other workers return {}."""
        if PartialState(cpu=self.args.use_cpu).num_processes > 1:
            raise ValueError(
                "The stage sample runs in one process; start it without accelerate launch. To sample in n processes, "
                "start each of them with --worker k/n."
            )
        if self.args.worker is None:
            return super().run()
        with ExitStack() as held:
            with locks.lock(self.folder):  # Wait if another process is finishing the stage.
                held.enter_context(locks.lock(self.folder, self._part))
                finished = self.begin()
            if not finished:
                self._sample_shards()
        return {} if self.has_missing_shards() else super().run()

    @property
    def _part(self) -> str:
        """Return the part of the folder that this worker locks."""
        return "" if self.args.worker is None else f"-{self.args.worker.replace('/', '-of-')}"

    def _has_results(self) -> bool:
        # Another worker may still load its model for these settings.
        return super()._has_results() or locks.others_work(self.folder, self._part)

    def make(self) -> Result:
        """Sample the missing shards."""
        self._sample_shards()
        return count_rows(self.folder), {}

    def _paths(self, problems: Dataset) -> list[Path]:
        """Return the paths of all shards for these problems."""
        count = -(-len(problems) // self.args.problems_per_shard)
        return [shard_path(self.folder, k, count) for k in range(count)]

    def has_missing_shards(self) -> bool:
        """Return whether the completions of any problem are missing."""
        return not all(path.is_file() for path in self._paths(load_problems(self.args, self.args.split)))

    def _sample_shards(self) -> None:
        args, problems = self.args, load_problems(self.args, self.args.split)
        first, workers = map(int, (args.worker or "0/1").split("/"))
        own = list(enumerate(self._paths(problems)))[first::workers]
        missing = [(k, path) for k, path in own if not path.is_file()]
        if not missing:
            return
        check, draw = _sampler(args, stop_strings_of(args, problems))
        check(problems)  # A later error would ask for settings that do not fit the finished shards.
        progress = {"desc": f"Sampling {args.split} problems", "unit": "shard", "initial": len(own) - len(missing)}
        for k, path in tqdm(missing, total=len(own), **progress):
            start, size = k * args.problems_per_shard, args.problems_per_shard
            part = problems.select(range(start, min(start + size, len(problems))))
            rows = draw(part, seed_of("sample", args.seed, args.iteration, args.split, k))
            write_shard(rows.with_format("arrow")[:], path, {self.name: []})


def _sampler(args: SampleArguments, stops: tuple[str, ...]) -> tuple[Callable[..., object], Callable[..., Dataset]]:
    """Load the model. Return a function that checks prompts, and one that samples completions with a seed."""
    if args.sampling_backend == "vllm":
        check_files(model_path(args))
        adapter, own = adapter_of(args, args.vllm_dtype), (args.model_revision, args.trust_remote_code)
        engine = start_engine(model_path(args), args, args.seed, *own, adapter)
        return (
            lambda all_problems: encode_prompts(
                engine.get_tokenizer(), all_problems, args, engine.llm_engine.model_config.max_model_len
            ),
            lambda problems, seed: sample_completions_with_vllm(engine, problems, args, stops, seed, adapter),
        )
    model = load_model(args, loading(args)).to(PartialState().device)
    tokenizer = load_tokenizer(args)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return (
        lambda all_problems: encode_prompts(tokenizer, all_problems, args, context),
        lambda problems, seed: sample_completions(model, tokenizer, problems, args, stops, seed, "Sampling a shard"),
    )
