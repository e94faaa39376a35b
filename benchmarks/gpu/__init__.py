"""Figures at full size, on one GPU of 80 to 140 GB, see `docs/full_size.md`.

`steps` times trainers and compares their memory with `topr plan`, `precision` compares log-probabilities in bfloat16
and float32, `learning` trains models from scratch and then each method on what they write, `page` writes the page.
Weights are random, and only GSM8K is downloaded; PyTorch, transformers and TRL are enough. ZeRO-3 with offloading runs
if DeepSpeed is there, padding-free steps if FlashAttention is.

    python -m benchmarks.gpu                  # all parts; finished cells are not run again
    python -m benchmarks.gpu steps            # one part
    python -m benchmarks.gpu --gsm8k FOLDER   # with gsm8k_train.jsonl and gsm8k_test.jsonl, instead of the Hub's
    python -m benchmarks.gpu --tiny           # does it all work? on a CPU, without results
"""
