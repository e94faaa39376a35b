"""Write logs of inspect_ai's own evaluation with its mock model: a `.eval` and a `.json`.

pip install inspect_ai==0.3.285 && python with_inspect.py
"""

import shutil
import tempfile
from pathlib import Path

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessageAssistant,
    ChatMessageUser,
    ContentReasoning,
    ContentText,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool

HERE = Path(__file__).parent
QUESTION = "How many legs have 3 cats? " + "Count slowly. " * 20  # long enough to become an attachment


@tool
def legs():
    async def execute(animal: str) -> str:
        """Return the legs of an animal.

        Args:
            animal: The animal.
        """
        return "FOUR"

    return execute


def answers():
    for text in ("12", "7"):
        used = ModelUsage(
            input_tokens=1, output_tokens=1, total_tokens=2
        )  # Otherwise, inspect_ai counts tokens with a downloaded tokenizer.
        called = ModelOutput.for_tool_call("mockllm/model", "legs", {"animal": "cat"})
        yield called.model_copy(update={"usage": used})
        thought = [ContentReasoning(reasoning="3 times 4."), ContentText(text=text)]
        said = ChatMessageAssistant(content=thought, model="mockllm/model", source="generate")
        yield ModelOutput(model="mockllm/model", usage=used,
                          choices=[ChatCompletionChoice(message=said, stop_reason="stop")])  # fmt: skip


def main():
    task = Task(
        dataset=[Sample(id=1, input=[ChatMessageUser(content="1 + 1?"), ChatMessageAssistant(content="EXAMPLE"),
                                     ChatMessageUser(content=QUESTION)], target="12"),
                 Sample(id=2, input=QUESTION, target="12")],
        solver=[system_message("Calculate."), use_tools(legs()), generate()], scorer=includes(), name="cats",
    )  # fmt: skip
    for kind in ("eval", "json"):
        with tempfile.TemporaryDirectory() as folder:
            model = get_model("mockllm/model", custom_outputs=list(answers()), memoize=False)
            eval(task, model=model, temperature=0.7, log_dir=folder, log_format=kind,
                 display="none", max_samples=1)  # fmt: skip
            shutil.copyfile(next(Path(folder).glob(f"*.{kind}")), HERE / f"inspect-0.3.285.{kind}")


if __name__ == "__main__":
    main()
