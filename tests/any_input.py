"""Hypothesis strategies for valid and invalid input from outside, and helpers for tests that use them."""

from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from topr_trl.data.tables import from_table
from topr_trl.tasks import arithmetic

# The tests' profile has 100 examples, and the profile of scripts/fuzz.py has no limit. `few` allows a fourth of the
# examples, and `fewer` a sixteenth.
few, fewer = (
    settings(max_examples=settings.default.max_examples // n, deadline=None, suppress_health_check=list(HealthCheck))
    for n in (4, 16)
)


@contextmanager
def refused_by_name(*names):
    """Allow a ValueError, or an OSError from an unreadable file, if its message contains one of the names."""
    refusal = None
    try:
        yield
    except (ValueError, OSError) as error:
        refusal = error
    assert refusal is None or any(name in str(refusal) for name in names), f"{refusal!r} names none of {names}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()}))
TYPES = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)), (pa.float64(), st.floats()), (pa.float32(), st.floats(width=32)),
    (pa.bool_(), st.booleans()), (pa.string(), st.text()), (pa.large_string(), st.text()), (pa.binary(), st.binary()),
    (pa.timestamp("us"), st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1))),
    (pa.list_(pa.int64()), st.lists(st.integers(-(2**63), 2**63 - 1))), (pa.list_(pa.float64()), st.lists(st.floats())),
    (pa.list_(pa.string()), st.lists(st.text())),
    (pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})), MESSAGES),
    (pa.struct({"a": pa.int64()}), st.fixed_dictionaries({"a": st.integers(0, 9)})), (pa.null(), st.none()),
]  # fmt: skip


@st.composite
def tables(draw, **right):
    """Draw rows with the columns `right`: `{name: (type, values)}`.

    Some columns are absent, have gaps or have another type.
    """
    count, columns = draw(st.integers(0, 8)), {}
    for name, own in right.items():
        kind = draw(st.sampled_from(["right"] * 8 + ["gaps", "other", "absent"]))
        if kind != "absent":
            type_, values = draw(st.sampled_from(TYPES)) if kind == "other" else own
            values = values if kind == "right" else st.none() | values
            columns[name] = pa.array(draw(st.lists(values, min_size=count, max_size=count)), type_)
    return from_table(pa.table(columns)) if columns else from_table(pa.table({"nothing": pa.array([1] * count)}))


@lru_cache
def bundled_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return tokenizer
