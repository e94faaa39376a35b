r"""TOPR on MATH: sample, score, curate, train, evaluate (arXiv 2503.14286, Sec. 4), as examples/gsm8k.py does on GSM8K.

Without arguments: an embedded small model on embedded word problems, GSM8K's kind and not MATH, but the same loop: some
minutes on a laptop's CPU.

    accelerate launch examples/hendrycks_math.py

The paper's set-up (4 worked examples, 32 candidates a problem, MATH-500 for the test, 16 samples of each problem); it
needs the extra `math`, whose math-verify judges what is in `\boxed{}`:

    accelerate launch examples/hendrycks_math.py --model_name_or_path meta-llama/Meta-Llama-3-8B-Instruct \
        --dataset_name EleutherAI/hendrycks_math --test_dataset_name HuggingFaceH4/MATH-500 --iterations 5 \
        --num_candidates 32 --per_device_train_batch_size 1

`--dataset_name` and `--test_dataset_name` may be files of MATH's shape (`.jsonl`).
"""

from gsm8k import run

from topr_trl.cli.main import console

if __name__ == "__main__":
    console(lambda arguments: run("math", "topr-math", arguments), "hendrycks_math.py")
