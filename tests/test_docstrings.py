"""Docstrings of public names give the type and the right default of each argument, and their examples run.

The tests read the docstrings from the source, as editors and other static tools do.
"""

import ast
import contextlib
import dataclasses
import doctest
import inspect
import io
import re
import warnings

import pytest
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer, SFTTrainer
from trl.experimental.async_grpo import AsyncGRPOTrainer

import topr_trl
from topr_trl import experimental
from topr_trl.tasks import arithmetic
from topr_trl.trainers.replay.buffer import ReplayBuffer, ReplayRow

OBJECTS = {name: getattr(topr_trl, name) for name in topr_trl.__all__}
OBJECTS |= {value.__name__: value for value in (ReplayBuffer, ReplayRow)}
OBJECTS |= {name: getattr(experimental, name) for name in experimental.__all__}
BASES = {"OfflineTOPRTrainer": SFTTrainer, "TOPRTrainer": GRPOTrainer, "AsyncTOPRTrainer": AsyncGRPOTrainer}
DOCUMENTED = {name: value for name, value in OBJECTS.items() if inspect.isclass(value) or inspect.isfunction(value)}
# Arguments of TRL's trainers that our trainers refuse or ignore.
WITHOUT = {"data_collator", "formatting_func", "compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"}
# Results of functions. They need no example of their own.
NO_EXAMPLE = {"Curated", "Diagnosis", "Difference", "Evaluation", "ReplayRow", "Samples"}
_ENTRY = re.compile(r"^ {4}(\w+) \((.*)\):$", re.MULTILINE)


def docstring(value):
    (node,) = (
        node
        for node in ast.parse(inspect.getsource(inspect.getmodule(value))).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == value.__name__
    )
    return ast.get_docstring(node, clean=True)


def arguments(name, value):
    """Return the default of each argument, which is `inspect.Parameter.empty` for a required argument."""
    if dataclasses.is_dataclass(value):
        ours = [kind for kind in inspect.getmro(value) if kind.__module__.startswith("topr_trl")]
        own = {field for kind in ours for field in inspect.get_annotations(kind)}
        return {
            field.name: field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else inspect.Parameter.empty
            if field.default is dataclasses.MISSING
            else field.default
            for field in dataclasses.fields(value)
            if field.name in own
        }
    found = {**inspect.signature(BASES.get(name, value)).parameters, **inspect.signature(value).parameters}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: p.default for n, p in found.items() if p.kind not in variable and n not in WITHOUT}


@pytest.mark.parametrize("name", sorted(set(DOCUMENTED) - {"Evaluations"}))  # a dictionary with any keys
def test_every_argument_has_type_and_default(name):
    text = docstring(DOCUMENTED[name])
    entries = dict(_ENTRY.findall(text))
    expected = arguments(name, DOCUMENTED[name])
    assert not set(expected) - set(entries)
    for argument, default in expected.items():
        kind, _, said = entries[argument].partition(", defaults to ")
        assert re.match(r"\[?`", kind), argument
        if name == "OfflineTOPRTrainer" and argument == "train_dataset":
            default = inspect.Parameter.empty  # TRL's default is None, which our trainer refuses
        assert kind.endswith("*optional*") == (default is not inspect.Parameter.empty), argument
        assert ast.literal_eval(said.strip("`") or "None") == (
            None if default is inspect.Parameter.empty else default
        ), argument


@pytest.fixture
def world(tokenizer, tmp_path, monkeypatch):
    """Create a working directory that only has the bundled model, under the name in the examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    name = "Qwen/Qwen2.5-0.5B"
    AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL, dtype="float32").save_pretrained(name)
    tokenizer.save_pretrained(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(DOCUMENTED) - NO_EXAMPLE))
def test_examples(name, world):
    parsed = doctest.DocTestParser().get_examples(docstring(DOCUMENTED[name]).replace("\n```", "\n\n```"))
    assert parsed
    names = {}
    for example in parsed:
        if doctest.SKIP in example.options:
            continue
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(example.source, f"<{name}>", "single"), names)
        # As in TRL, an example may leave out its output.
        assert not example.want or shown.getvalue() == example.want, example.source
