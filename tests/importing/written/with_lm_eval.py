"""Write samples of lm-evaluation-harness with its own evaluator. The model takes its answers from a list.

pip install lm-eval==0.4.13 && python with_lm_eval.py
"""

import json
import shutil
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.api_models import JsonChatStr
from lm_eval.tasks import TaskManager

HERE = Path(__file__).parent
TASK = """
task: cats
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["Question:"], do_sample: true, temperature: 0.7}
metric_list: [{metric: exact_match}]
filter_list:
  - {name: strict, filter: [{function: remove_whitespace}, {function: take_first}]}
  - {name: number, filter: [{function: regex, regex_pattern: "(\\\\d+)"}, {function: take_first}]}
"""


class Answers(TemplateLM):
    eot_token_id, tokenizer_name = 0, "none"

    def __init__(self, chat):
        super().__init__()
        self.chat = chat

    def apply_chat_template(self, history, add_generation_prompt=True):
        return JsonChatStr(json.dumps(history)) if self.chat else super().apply_chat_template(history)

    def generate_until(self, requests, **_):
        return [("12", " 7 legs")[n % 2] for n, _ in enumerate(requests)]

    def loglikelihood_rolling(self, requests, **_): ...
    def _loglikelihood_tokens(self, requests, **_): ...
    def tok_encode(self, text, **_): ...


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data.jsonl"
        data.write_text('{"question": "How many legs have 3 cats?", "answer": "12"}\n' * 2)
        (folder / "cats.yaml").write_text(TASK.replace("DATA", str(data)))
        tasks = TaskManager(include_path=name, include_defaults=False)
        for kind in ("text", "chat"):
            tracker = EvaluationTracker(output_path=str(folder / kind))
            results = simple_evaluate(
                Answers(kind == "chat"), tasks=["cats"], task_manager=tasks, log_samples=True, bootstrap_iters=0,
                apply_chat_template=kind == "chat", evaluation_tracker=tracker,
            )  # fmt: skip
            tracker.date_id = "now"
            tracker.save_results_samples("cats", results["samples"]["cats"])
            shutil.copyfile(next((folder / kind).rglob("samples_cats_*")), HERE / f"lm-eval-0.4.13-{kind}.jsonl")


if __name__ == "__main__":
    main()
