"""Settings that cannot work, in Python, YAML and on the command line. See `bad_input.py`."""

from typing import Any

from bad_input import Case, Kept, Kit, cases, kit
from transformers import TrainingArguments

from topr_trl import OfflineTOPRConfig, SamplingArguments, TOPRConfig
from topr_trl.cli.memory_plan import PlanArguments
from topr_trl.pipeline.arguments import BackendArguments, IterateArguments, ProblemArguments
from topr_trl.pipeline.stages.sample import SampleArguments

__all__ = ["kit"]


def _nothing_begun(kit: Kit) -> None:
    assert kit.trainer is None
    assert not kit.out.exists()


NOTHING_BEGUN = Kept("nothing has begun", _nothing_begun)


def setting(given: str, message: str, of: type = OfflineTOPRConfig, error: Any = ValueError, **settings: Any) -> Case:
    """Settings of a trainer or of a stage; those that both trainers have are tried with both."""

    def do(kit: Kit) -> None:
        on_a_cpu = {"output_dir": str(kit.out), "use_cpu": True, "bf16": False}
        of(**{**(on_a_cpu if issubclass(of, TrainingArguments) else {}), **settings})

    return Case(given, do, message, NOTHING_BEGUN, error)


def of_both(given: str, message: str, error: Any = ValueError, **settings: Any) -> Case:
    def do(kit: Kit) -> None:
        cases = [setting(given, message, of, error, **settings) for of in (TOPRConfig, OfflineTOPRConfig)]
        cases[0].run(kit)
        cases[1].do(kit)

    return Case(given, do, message, NOTHING_BEGUN, error)


SETTINGS = [
    setting(
        "a chat template that is not there",
        "chat_template_path: there is no file nowhere.jinja.",
        chat_template_path="nowhere.jinja",
    ),
    of_both(
        "an unknown preset", "preset must be one of topr, positives_only, reinforce, opr, tis, not 'ppo'.", preset="ppo"
    ),
    of_both("a limit below 0", "Truncation limits must be >= 0 and a_neg finite: a_neg=-0.1, b_neg=1.0.", a_neg=-0.1),
    of_both(
        "an upper limit below 0",
        "Truncation limits must be >= 0 and a_neg finite: a_neg=0.0, b_neg=-1.0.",
        b_neg=-1.0,
    ),
    of_both(
        "limits in the wrong order",
        "The lower truncation limit a_neg=2.0 is above the upper one b_neg=1.0. Swap or raise them.",
        a_neg=2.0,
    ),
    of_both(
        "a lower limit above 0 for negatives",
        "a_neg=0.1 is above 0: the objective has no upper bound once a reward is negative (Prop. 3.2), and "
        "off-policy the model collapses. Good for a comparison; TOPR has a_neg=0.",
        UserWarning,
        a_neg=0.1,
    ),
    of_both(
        "a baseline that is no number",
        "baseline must be a number or one of mean, group_mean, not 'median'.",
        baseline="median",
    ),
    of_both("a baseline that is NaN", "baseline must be finite, not nan.", baseline="nan"),
    of_both("a share of 0", "effective_positive_share must be in (0, 1], not 0.0.", effective_positive_share=0.0),
    of_both(
        "a baseline and a share",
        "baseline=0.5 and effective_positive_share=0.2 both set the baseline. Keep one of them (baseline='mean', the "
        "default, counts as none).",
        baseline=0.5,
        effective_positive_share=0.2,
    ),
    of_both(
        "positives alone, and a share",
        "curation='positives' leaves no negatives, so effective_positive_share cannot be reached. Remove one.",
        curation="positives",
        effective_positive_share=0.2,
    ),
    of_both(
        "an unknown curation",
        "curation must be one of none, uniform, positives, positive_share, anna_karenina, not 'best'.",
        curation="best",
    ),
    of_both("no row to keep", "iteration_size must be at least 1, not 0.", curation="uniform", iteration_size=0),
    of_both(
        "a number of rows, and no curation",
        "iteration_size needs a curation rule; set curation='uniform' to draw rows at random.",
        iteration_size=10,
    ),
    of_both(
        "a share of positives above 1",
        "curation_positive_share must be in [0, 1], not 2.0.",
        curation="positive_share",
        curation_positive_share=2.0,
    ),
    of_both(
        "an unknown level of the ratio",
        "ratio_level must be one of sequence, token, geometric, not 'word'.",
        ratio_level="word",
    ),
    of_both("an unknown source of log μ", "log_mu must be one of trainer, sampler, not 'guess'.", log_mu="guess"),
    setting(
        "a loss of GRPO's",
        "loss_type='cispo' cannot be used with TOPRTrainer. Remove it. TOPRTrainer has a "
        "loss of its own; related ones are presets: topr, positives_only, reinforce, opr, tis.",
        TOPRConfig,
        loss_type="cispo",
    ),
    setting(
        "the loss to tell the best model",
        "metric_for_best_model='loss': the loss is -mean(w · R), which says nothing of how good a model is; with "
        "baseline='mean' each evaluation's is 0. Set metric_for_best_model='eval_reward', or leave it out.",
        TOPRConfig,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    ),
    setting(
        "the loss to tell the best model, offline",
        "The best checkpoint, and reduce_lr_on_plateau, would go by the loss (metric_for_best_model), which rises as "
        "negatives become less likely: the model before training can have the lowest. Name a metric that a callback of "
        "yours adds to evaluations, or keep the checkpoints and compare them with topr evaluate.",
        load_best_model_at_end=True,
        eval_strategy="steps",
    ),
    setting(
        "a setting of GRPO's loss",
        "epsilon=0.3 cannot be used with TOPRTrainer. Remove it. How far a ratio "
        "counts is set by `preset`, or by `a_pos`, `b_pos`, `a_neg`, `b_neg`.",
        TOPRConfig,
        epsilon=0.3,
    ),
    setting(
        "several settings of GRPO's loss",
        "epsilon=0.3 and scale_rewards='batch' cannot be used with TOPRTrainer. Remove "
        "them. How far a ratio counts is set by `preset`, or by `a_pos`, `b_pos`, `a_neg`, `b_neg`. TOPR uses the raw "
        "reward minus `baseline`; nothing is divided by a standard deviation.",
        TOPRConfig,
        epsilon=0.3,
        scale_rewards="batch",
    ),
    setting(
        "scaled rewards",
        "scale_rewards='batch' cannot be used with TOPRTrainer. Remove it. TOPR "
        "uses the raw reward minus `baseline`; nothing is divided by a standard deviation.",
        TOPRConfig,
        scale_rewards="batch",
    ),
    setting(
        "the sampler's log μ without vLLM",
        "log_mu='sampler' needs use_vllm=True: transformers' generate reports no log-probabilities.",
        TOPRConfig,
        log_mu="sampler",
    ),
    setting(
        "the sampler's log μ with a filter",
        "log_mu='sampler' with top_k=500: the sampler's log-probabilities are then not those of the whole vocabulary "
        "at `temperature`, which the trainer computes. Those of a part of it are larger, and every negative would "
        "begin with a small weight. Leave that out, or set log_mu='trainer'.",
        TOPRConfig,
        log_mu="sampler",
        use_vllm=True,
        top_k=500,
    ),
    setting(
        "a KL term off-policy",
        "beta=0.1 with use_bias_correction_kl=True needs the ratio of each token to the sampling weights once "
        "a batch is used for several optimizer steps, and TOPR's loss does not hold it. Set "
        "use_bias_correction_kl=False, or beta=0 (the paper's).",
        TOPRConfig,
        beta=0.1,
        num_iterations=2,
    ),
    setting(
        "packing",
        "packing=True cannot be used with OfflineTOPRTrainer. Remove it. A "
        "completion is weighted as a whole, so rows are not packed.",
        packing=True,
    ),
    setting(
        "the best checkpoint by the loss, offline",
        "The best checkpoint, and reduce_lr_on_plateau, would go by the loss (metric_for_best_model), which rises as "
        "negatives become less likely: the model before training can have the lowest. Name a metric that a callback of "
        "yours adds to evaluations, or keep the checkpoints and compare them with topr evaluate.",
        save_strategy="best",
        metric_for_best_model="loss",
    ),
    setting(
        "noise in the embeddings",
        "neftune_noise_alpha=5.0 cannot be used with TOPRTrainer. Remove it. The noise changes log π but not log μ, so "
        "TOPR's weights would be wrong.",
        TOPRConfig,
        neftune_noise_alpha=5.0,
    ),
    setting(
        "rows that are not to be prepared",
        "dataset_kwargs={'skip_prepare_dataset': True} cannot be used with OfflineTOPRTrainer. Remove it. Rows are "
        "always prepared from `prompt`, `completion` and `reward`.",
        dataset_kwargs={"skip_prepare_dataset": True},
    ),
    setting(
        "an order that does not work in several processes",
        "accelerator_config with dispatch_batches=True does not work with the order in which the trainer reads rows in "
        "several processes. Leave dispatch_batches out.",
        accelerator_config={"dispatch_batches": True},
    ),
    setting(
        "activations offloaded from the CPU",
        "activation_offloading=True moves activations from an accelerator to the CPU, and this training runs on the "
        "CPU. Leave it out; gradient_checkpointing=True saves memory here.",
        activation_offloading=True,
    ),
    setting(
        "a stop token in `generation_kwargs`",
        "generation_kwargs with eos_token_id=[1, 2] cannot be used. TRL only recognizes the stop tokens of tokenizer "
        "and model. After another stop token, padding would count as completion. Set "
        "model.generation_config.eos_token_id: sampling reads it, too.",
        TOPRConfig,
        generation_kwargs={"eos_token_id": [1, 2]},
    ),
    setting(
        "beams in `generation_kwargs`",
        "generation_kwargs with num_beams=4 and num_return_sequences=4 cannot be used. Beams are not samples of the "
        "policy. Remove it. TRL expects one completion for each row. Set num_generations.",
        TOPRConfig,
        generation_kwargs={"num_beams": 4, "num_return_sequences": 4},
    ),
    setting("no completion", "num_generations must be at least 1, not 0.", SamplingArguments, num_generations=0),
    setting(
        "a temperature of 0",
        "temperature must be above 0, not 0.0: completions of one prompt have to differ. Set greedy=True for one more "
        "completion at temperature 0.",
        SamplingArguments,
        temperature=0.0,
    ),
    setting("`top_p` above 1", "top_p must be in (0, 1], not 1.5.", SamplingArguments, top_p=1.5),
    setting(
        "`top_k` of 0",
        "top_k must be at least 1, not 0; one above the vocabulary keeps every token.",
        SamplingArguments,
        top_k=0,
    ),
    setting("an unknown task", "task must be one of gsm8k, math, not 'gsm9k'.", ProblemArguments, task="gsm9k"),
    setting(
        "an unknown backend",
        "sampling_backend must be one of transformers, vllm, not 'tgi'.",
        BackendArguments,
        sampling_backend="tgi",
    ),
    setting(
        "a worker that is none of them",
        "worker must be k/n with k < n, as in 0/8, not '2/2'.",
        SampleArguments,
        worker="2/2",
    ),
    setting("fewer examples than none", "num_shots must be at least 0, not -1.", ProblemArguments, num_shots=-1),
    setting(
        "drawn examples of the wrong task",
        "training_shots draws from MATH's training problems: it needs task=math and a dataset_name.",
        ProblemArguments,
        training_shots=True,
    ),
    setting("no iteration", "iterations must be at least 1, not 0.", IterateArguments, iterations=0),
    setting(
        "an Accelerate config that is not there",
        "--accelerate_config: nowhere does not exist.",
        IterateArguments,
        FileNotFoundError,
        accelerate_config="nowhere",
    ),
    setting("no GPU", "gpus must be at least 1, not 0.", PlanArguments, gpus=0),
    setting(
        "more of a GPU than there is",
        "mfu must be in (0, 1], not 1.5.",
        PlanArguments,
        mfu=1.5,
    ),
]


def command(given: str, message: str, *arguments: Any, file: str | None = None) -> Case:
    """A command line; `file` is written to `own.yaml`."""

    def do(kit: Kit) -> None:
        if file is not None:
            (kit.folder / "own.yaml").write_text(file)
        kit.topr(*arguments)

    return Case(given, do, message, NOTHING_BEGUN, SystemExit)


CONFIG = ("--config", "own.yaml")
COMMANDS = [
    command(
        "an unknown command",
        "topr sampel: There is no command 'sampel'. Did you mean topr sample?",
        "sampel",
    ),
    command("no command", "usage: topr … COMMAND topr: error: the following arguments are required: COMMAND"),
    command(
        "an unknown setting",
        "topr sample: There is no setting --num_generation. Did you mean --num_generations?",
        "sample",
        "--num_generation",
        3,
    ),
    command(
        "a value of the wrong type",
        "usage: topr sample [--config FILE] [settings] topr sample: error: argument "
        "--num_generations/--num-generations: invalid int value: 'ten'",
        "sample",
        "--num_generations",
        "ten",
    ),
    command(
        "a value that is no choice",
        "usage: topr sample [--config FILE] [settings] topr sample: error: argument --dtype: invalid choice: 'int3' "
        "(choose from …)",
        "sample",
        "--dtype",
        "int3",
    ),
    command("no `--output_dir`", "topr sample: Name the folder to write with --output_dir.", "sample"),
    command(
        "no `--input`",
        "topr train: This command reads rows: name their folder or file with --input.",
        "train",
        "--output_dir",
        "out",
    ),
    command("`--config` without a file", "topr sample: --config needs the name of a YAML file.", "sample", "--config"),
    command(
        "a config file that is not there",
        "topr sample: [Errno 2] No such file or directory: 'own.yaml'",
        "sample",
        *CONFIG,
    ),
    command(
        "YAML that is a list",
        "topr sample: own.yaml must hold settings, one per line, as in `learning_rate: 1.0e-6`.",
        "sample",
        *CONFIG,
        file="- a\n- b\n",
    ),
    command(
        "YAML that is empty",
        "topr sample: own.yaml must hold settings, one per line, as in `learning_rate: 1.0e-6`.",
        "sample",
        *CONFIG,
        file="",
    ),
    command(
        "YAML that is none",
        'topr sample: while parsing a flow sequence in "own.yaml", line 1, column 4 …',
        "sample",
        *CONFIG,
        file="a: [1\n",
    ),
    command(
        "an unknown setting in YAML",
        "topr sample: There is no setting --num_generation (in own.yaml). Did you mean --num_generations?",
        "sample",
        *CONFIG,
        file="num_generation: 1\n",
    ),
    command(
        "a value of the wrong type in YAML",
        "usage: topr sample [--config FILE] [settings] topr sample: error: argument "
        "--num_generations/--num-generations: invalid int value: 'many'",
        "sample",
        *CONFIG,
        file="num_generations: many\n",
    ),
    command(
        "an Accelerate config that is a list",
        "topr iterate: own.yaml must hold settings of Accelerate, as `accelerate config` writes them.",
        "iterate",
        "--output_dir",
        "out",
        "--accelerate_config",
        "own.yaml",
        file="- a\n",
    ),
    command(
        "a setting of another command",
        "topr score: There is no setting --worker. It is a setting of topr sample.",
        "score",
        "--worker",
        "0/2",
        "--input",
        ".",
        "--output_dir",
        "out",
    ),
    command(
        "`--input` for the loop",
        "topr iterate: There is no setting --input. It is a setting of topr import, score, curate, log-mu, train, "
        "evaluate, trial, plot, push.",
        "iterate",
        "--input",
        ".",
        "--output_dir",
        "out",
    ),
    command(
        "a setting of another command in YAML",
        "topr score: There is no setting --worker (in own.yaml). It is a setting of topr sample.",
        "score",
        *CONFIG,
        file="worker: 0/2\n",
    ),
    command(
        "text that is no number in YAML",
        "usage: topr train [--config FILE] [settings] topr train: error: argument --learning_rate/--learning-rate: "
        "invalid float value: 'fast'",
        "train",
        *CONFIG,
        file="learning_rate: fast\n",
    ),
    command(
        "a list for a number in YAML",
        "topr sample: num_generations must be int, not [4].",
        "sample",
        *CONFIG,
        file="num_generations: [4]\n",
    ),
    command(
        "`save_only_model` for the loop",
        "topr iterate: save_only_model leaves no checkpoint to resume from: leave it out.",
        "iterate",
        "--save_only_model",
        "true",
        "--output_dir",
        "out",
    ),
    command(
        "Adafactor under FSDP2",
        "topr iterate: optim='adafactor' (the default) cannot step on weights that FSDP2 shards: it mixes "
        "plain tensors with DTensors. Set optim='adamw_torch_fused', or use DeepSpeed.",
        "iterate",
        "--output_dir",
        "out",
        "--optim",
        "adafactor",
        "--accelerate_config",
        "own.yaml",
        file="distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n",
    ),
    command(
        "a model to plan for that is not there",
        "topr plan: There is no model 'nowhere': name one of 8b, 14b, 70b, a folder with a config.json, or a model of "
        "the Hub.",
        "plan",
        "--model",
        "nowhere",
    ),
]

DOORS = {"Settings": SETTINGS, "Command line": COMMANDS}


@cases([case for door in DOORS.values() for case in door])
def test_case(case: Case, kit: Kit) -> None:
    case.run(kit)
