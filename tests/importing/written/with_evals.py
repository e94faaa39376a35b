"""Write a log of OpenAI's evals, and output items of OpenAI's Evals API with the classes of OpenAI's client.

    pip install --no-deps evals==3.0.1.post1 && pip install openai==3.57.0 blobfile lz4 zstandard backoff tiktoken
    OPENAI_API_KEY=none python with_evals.py

The answers are given, and the values of the items.
"""

import json
import random
from pathlib import Path

from evals.api import DummyCompletionFn
from evals.base import RunSpec
from evals.elsuite.basic.match import Match
from evals.record import LocalRecorder, record_sampling
from openai.types.evals.runs import OutputItemListResponse

ASKED = [{"role": "system", "content": "Calculate."}, {"role": "user", "content": "How many legs have 3 cats?"}]
ANSWERS = ("12", "17 legs")


class Answers(DummyCompletionFn):
    """Completion function with given answers."""

    def __init__(self):
        self.left = list(ANSWERS)

    def __call__(self, prompt, **kwargs):
        answer = self.left.pop(0)
        record_sampling(prompt=prompt, sampled=[answer], model="m", usage={"total_tokens": 3})

        class Result:
            def get_completions(self):
                return [answer]

        return Result()


def main():
    spec = RunSpec(["m"], "legs.test.v0", "legs", "test", {}, "")
    recorder = LocalRecorder("evals-3.0.1.jsonl", spec)
    match = Match([Answers()], samples_jsonl="", eval_registry_path=Path(), name="legs.test.v0")
    for n in range(2):
        with recorder.as_default_recorder(f"legs.test.{n}"):
            match.eval_sample({"input": ASKED, "ideal": "12"}, random.Random(0))
    recorder.record_final_report({"accuracy": 0.5})
    recorder.flush_events()
    items = [
        OutputItemListResponse.model_validate({
            "id": f"outputitem_{n}", "object": "eval.run.output_item", "created_at": 0, "run_id": "r", "eval_id": "e",
            "status": "pass" if n == 0 else "fail", "datasource_item_id": n, "datasource_item": {"n": 3},
            "results": [{"name": "exact", "type": "string-check-grader", "passed": n == 0, "score": 1.0 - n}],
            "sample": {
                "input": ASKED, "output": [{"role": "assistant", "content": answer}], "finish_reason": "stop",
                "model": "m", "temperature": 0.7, "top_p": 1.0, "seed": 1, "max_completion_tokens": 64,
                "usage": {"total_tokens": 3, "completion_tokens": 1, "prompt_tokens": 2, "cached_tokens": 0},
                "error": {"code": "", "message": ""},
            },
        }).to_dict()
        for n, answer in enumerate(ANSWERS)
    ]  # fmt: skip
    page = {"object": "list", "data": items, "first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
    Path("openai-evals-3.57.0.json").write_text(json.dumps(page, indent=1))


if __name__ == "__main__":
    main()
