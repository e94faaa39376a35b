"""Settings that cannot work, in Python, YAML and on the command line. See `bad_input.py`."""

from typing import Any

from bad_input import Case, Kit, cases, kit
from transformers import TrainingArguments

from topr_trl import OfflineTOPRConfig, SamplingArguments, TOPRConfig
from topr_trl.cli.memory_plan import PlanArguments
from topr_trl.pipeline.settings import BackendArguments, IterateArguments, ProblemArguments
from topr_trl.pipeline.stages.sample import SampleArguments

__all__ = ["kit"]


def nothing_begun(kit: Kit) -> None:
    assert kit.trainer is None
    assert not kit.out.exists()


def setting(given: str, words: str, of: type = OfflineTOPRConfig, error: Any = ValueError, **settings: Any) -> Case:
    """Settings of the class `of`, which belongs to a trainer, a stage or a command."""

    def do(kit: Kit) -> None:
        on_a_cpu = {"output_dir": str(kit.out), "use_cpu": True, "bf16": False}
        of(**{**(on_a_cpu if issubclass(of, TrainingArguments) else {}), **settings})

    return Case(given, do, words, nothing_begun, error)


def of_both(given: str, words: str, error: Any = ValueError, **settings: Any) -> Case:
    def do(kit: Kit) -> None:
        cases = [setting(given, words, of, error, **settings) for of in (TOPRConfig, OfflineTOPRConfig)]
        cases[0].run(kit)
        cases[1].do(kit)

    return Case(given, do, words, nothing_begun, error)


# fmt: off
SETTINGS = [
    of_both("an unknown preset", "preset, topr, positives_only, reinforce, opr, tis, 'ppo'", preset="ppo"),
    of_both("a limit below 0", ">= 0, a_neg=-0.1", a_neg=-0.1),
    of_both("limits in the wrong order", "a_neg=2.0, b_neg=1.0, lower a_neg", a_neg=2.0),
    of_both("a lower limit above 0 for negatives", "a_neg=0.1, Prop. 3.2, a_neg=0", UserWarning, a_neg=0.1),
    of_both("a baseline that is NaN", "baseline, finite, nan", baseline="nan"),
    of_both("a share of 0", "effective_positive_share, (0, 1], 0.0", effective_positive_share=0.0),
    of_both("a baseline and a share", "baseline=0.5, effective_positive_share=0.2, remove one", baseline=0.5,
        effective_positive_share=0.2),
    of_both("a learning rate as text, as PyYAML reads 1e-5", "learning_rate, float, '1e-5', write 1.0e-5",
        learning_rate="1e-5"),
    of_both("an unknown curation", "curation, none, uniform, positives, positive_share, balanced, repeated_positives,"
        " anna_karenina, 'best'", curation="best"),
    of_both("no row to keep", "iteration_size, at least 1, 0", curation="uniform", iteration_size=0),
    of_both("a share of positives above 1", "curation_positive_share, [0, 1], 2.0", curation="positive_share",
        curation_positive_share=2.0),
    of_both("an unknown level of the ratio", "ratio_level, sequence, segment, 'word'", ratio_level="word"),
    of_both("a segment without tokens", "segment_tokens, at least 1, 0", ratio_level="segment", segment_tokens=0),
    of_both("segment_tokens without ratio_level='segment'", "segment_tokens=16, ratio_level='segment', leave, out",
        segment_tokens=16),
    of_both("a resumed run that would read rows again", "ignore_data_skip=True, remove it", ignore_data_skip=True),
    of_both("an unknown source of log μ", "log_mu, trainer, sampler, 'guess'", log_mu="guess"),
    setting("an order that does not work in several processes",
        "accelerator_config, dispatch_batches=True, leave dispatch_batches out",
        accelerator_config={"dispatch_batches": True}),
    setting("a KL term off-policy", "beta=0.1, use_bias_correction_kl=True, use_bias_correction_kl=False, beta=0",
        TOPRConfig, beta=0.1, num_iterations=2),
    setting("no completion", "num_generations, at least 1, 0", SamplingArguments, num_generations=0),
    setting("a temperature of 0 for the trainer", "temperature, above 0, 0.0", TOPRConfig, temperature=0.0),
    setting("`top_p` above 1", "top_p, (0, 1], 1.5", SamplingArguments, top_p=1.5),
    setting("`top_k` of 0", "top_k, at least 1, 0", SamplingArguments, top_k=0),
    setting("an unknown task", "task, gsm8k, math, 'gsm9k'", ProblemArguments, task="gsm9k"),
    setting("an unknown backend", "sampling_backend, transformers, vllm, 'tgi'", BackendArguments,
        sampling_backend="tgi"),
    setting("a worker that is none of them", "worker, k/n, '2/2', 0/8", SampleArguments, worker="2/2"),
    setting("fewer examples than none", "num_shots, at least 0, -1", ProblemArguments, num_shots=-1),
    setting("no iteration", "iterations, at least 1, 0", IterateArguments, iterations=0),
    setting("an adapter that vLLM cannot load", "vLLM, use_dora=True, sampling_backend='transformers', "
        "vllm_dtype='float32'", IterateArguments, use_peft=True, use_dora=True, sampling_backend="vllm"),
    setting("an Accelerate config that is not there", "--accelerate_config, nowhere, not exist", IterateArguments,
        FileNotFoundError, accelerate_config="nowhere"),
    setting("no GPU", "gpus, at least 1, 0", PlanArguments, gpus=0),
]
# fmt: on


def command(given: str, words: str, *arguments: Any, file: str | None = None) -> Case:
    """A command line. `file` is the text of `own.yaml`."""

    def do(kit: Kit) -> None:
        if file is not None:
            (kit.folder / "own.yaml").write_text(file)
        kit.topr(*arguments)

    return Case(given, do, words, nothing_begun, SystemExit)


CONFIG = ("--config", "own.yaml")
# fmt: off
COMMANDS = [
    command("an unknown command", "'sampel', topr sample", "sampel"),
    command("a value of the wrong type", "--num_generations, int, 'ten'", "sample --num_generations ten"),
    command("a value that is no choice", "dtype, 'int3', must be one of", "sample --dtype int3"),
    command("no `--input`", "--input", "train --output_dir out"),
    command("`--config` without a file", "--config, YAML file", "sample --config"),
    command("a folder as config file", "--config, folder, YAML file", "sample --config ."),
    command("YAML that is a list", "own.yaml, settings, learning_rate", "sample --config own.yaml", file="- a\n- b\n"),
    command("YAML that is empty", "own.yaml, settings, learning_rate", "sample --config own.yaml", file=""),
    command("YAML that is none", '"own.yaml", line 1, column 4', "sample --config own.yaml", file="a: [1\n"),
    command("an Accelerate config that is a list", "own.yaml, accelerate config",
        "iterate --output_dir out --accelerate_config own.yaml", file="- a\n"),
    command("the name of a dataset on the Hub that is malformed", "--input, hub:logs, hub:owner/name",
        "import --input hub:logs --output_dir out"),
    command("`save_only_model` for the loop", "save_only_model, resume, remove",
        "iterate --save_only_model true --output_dir out"),
]
# fmt: on


@cases([*SETTINGS, *COMMANDS])
def test_case(case: Case, kit: Kit) -> None:
    case.run(kit)
