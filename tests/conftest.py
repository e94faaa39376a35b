import atexit
import gc
import logging
import os
import sys
from functools import cache
from pathlib import Path

# No test needs the network. huggingface_hub reads these variables at import. A look-up then fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

# Fixtures import torch, transformers and trl. The process that only deals out tests would need six seconds for them.

# Every run draws the same examples. If scripts/fuzz.py finds a failing case, the case is added as an `@example`.
settings.register_profile("deterministic", derandomize=True)
settings.load_profile("deterministic")
# Hypothesis would also draw constants of the local modules that are imported. Then examples would depend on the tests
# that ran before.
_NO_CONSTANTS = providers.Constants()
providers._get_local_constants = lambda: _NO_CONSTANTS


def pytest_collection_modifyitems(items):
    """Run slow tests first, so that no core waits for one of them at the end."""
    items.sort(key=lambda item: {"slow", "weekly"}.isdisjoint(mark.name for mark in item.iter_markers()))


# Imports make few cycles, and collections during imports take a tenth of their time.
gc.disable()


def pytest_collection_finish():
    """Keep imported objects out of garbage collections, which each start of training would make with them."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # Otherwise, the bindings of Triton, which newer releases of torch install, report the frozen objects as leaked.
    atexit.register(gc.unfreeze)
    if accelerate := sys.modules.get("accelerate.utils.imports"):
        # Each step of training asks several times which packages are installed. Accelerate would read their metadata.
        accelerate._is_package_available = cache(accelerate._is_package_available)


CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% for call in m.tool_calls or [] %}{{ call | tojson }}"
    "{% endfor %}{% if m['role'] == 'assistant' %}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(autouse=True)
def verbosity():
    """Restore the verbosity of libraries after each test. Benchmarks set it for the whole process."""
    from datasets.utils import logging as of_datasets
    from transformers.utils import logging as of_transformers

    loggings = (of_transformers, of_datasets)
    levels, logger = [each.get_verbosity() for each in loggings], logging.getLogger("trl")
    own = logger.level
    yield
    for each, level in zip(loggings, levels, strict=True):
        each.set_verbosity(level)
    logger.setLevel(own)


@pytest.fixture
def tokenizer():
    from transformers import AutoTokenizer

    from topr_trl.tasks import arithmetic

    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def tool_tokenizer(tokenizer):
    """Return the tokenizer with the chat template of Qwen3, which supports tool calls."""
    import trl

    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


@pytest.fixture
def bos_tokenizer(tokenizer):
    """Return the tokenizer, changed to add a BOS token at the start of a text, as Llama's tokenizer does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = tokenizer.pad_token  # a token in the model's vocabulary
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


@pytest.fixture
def model():
    """Return a fresh copy of the bundled model, in float32."""
    import torch
    from reference import fresh_model

    torch.manual_seed(0)
    return fresh_model()


@pytest.fixture
def moe(tokenizer):
    """Return a tiny mixture of experts with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4,
            num_experts_per_tok=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


@pytest.fixture
def rows():
    """Return eight scored completions of two problems. The fourth completion of each problem is right."""
    from datasets import Dataset

    prompts = ["Question: Ana has 4 pens. Ana finds 3 more. How many pens does Ana have now?\nAnswer:"] * 4
    prompts += ["Question: Ben has 9 coins. Ben gives away 2. How many coins does Ben have now?\nAnswer:"] * 4
    completions = [" 4 + 3 = 8. The answer is 8.", " 4 + 3 = 7.", " The answer is 6.", " 4 + 3 = 7. The answer is 7."]
    completions += [
        " 9 - 2 = 6. The answer is 6.", " 9", " 9 - 2 = 5. The answer is 5.", " 9 - 2 = 7. The answer is 7.",
    ]  # fmt: skip
    return Dataset.from_dict({
        "prompt": prompts,
        "completion": completions,
        "reward": [-1.0, -1.0, -1.0, 1.0] * 2,
        "problem_id": [0] * 4 + [1] * 4,
        "sample_id": [0, 1, 2, 3] * 2,
    })  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    """Chromium for the tests of pages."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    chromium = Path("/usr/bin/chromium")
    if not chromium.exists():
        pytest.skip(f"needs {chromium}: apt-get install chromium")
    with sync_api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=str(chromium), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def vllm(tmp_path_factory):
    """Yield the address of a vLLM server, which takes half a minute to start."""
    from vllm_server import vllm_server

    with vllm_server(tmp_path_factory.mktemp("vllm")) as address:
        yield address
