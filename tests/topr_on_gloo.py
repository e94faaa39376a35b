"""Run `topr` with DeepSpeed's messages over gloo: `python tests/topr_on_gloo.py train --input rows ...`.

On a CPU, DeepSpeed would compile messages through shared memory, which takes longer than the tests.
"""

import runpy


def messages_over_gloo() -> None:
    """Make DeepSpeed send its messages over gloo."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


if __name__ == "__main__":
    messages_over_gloo()
    runpy.run_module("topr_trl", run_name="__main__")
