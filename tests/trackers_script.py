"""Train both trainers a little, and report to the given trackers. See test_trackers.py."""

import sys
from pathlib import Path

import completions_tables


def main(out, trackers):
    for kind, more in (("offline", {}), ("online", {"num_iterations": 2})):
        trainer, _ = getattr(completions_tables, kind)(
            out / kind, report_to=trackers, project=kind, run_name=kind, trackio_space_id=None, max_steps=2,
            logging_steps=2, eval_strategy="steps", eval_steps=2, **more,
        )  # fmt: skip
        trainer.train()
        if "wandb" in trackers:
            import wandb

            wandb.finish()  # otherwise, the next training would continue this run


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
