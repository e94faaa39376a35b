from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from topr_trl.evaluation.answers import encode
from topr_trl.evaluation.pass_and_maj_at_k import expected_best, expected_maj, expected_pass, pass_at_k

CASES = ["AABBC", "AABB-", "AAAB-C", "BBCCA", "ABCDEF", "A-----", "BBBBB", "AAAAA", "-----", "AABBCC"]


def majority(draw):
    counts = Counter(answer for answer in draw if answer != "-")
    return counts.most_common(1)[0][0] if counts else None  # In a tie, the first answer wins.


def best(draw):
    valid = [(answer, score) for answer, score in draw if answer != "-"]
    return max(valid, key=lambda pair: pair[1])[0] if valid else None  # In a tie, the first answer wins.


@pytest.mark.parametrize("text", CASES)
def test_all_ordered_draws(text):
    """Exact values equal the mean over all ordered draws. A is the true answer."""
    scores = [float(i * i % 3) for i in range(len(text))]  # 0, 1, 1, 0, 1, 1: with ties
    samples = encode([[None if a == "-" else a for a in text]], ["A"], [scores])
    for k in range(1, len(text) + 1):
        draws = list(permutations(zip(text, scores, strict=True), k))
        slow_maj = np.mean([majority([a for a, _ in draw]) == "A" for draw in draws])
        slow_best = np.mean([best(draw) == "A" for draw in draws])
        slow_pass = np.mean([any(a == "A" for a, _ in draw) for draw in draws])
        assert expected_maj(samples, k)[0] == pytest.approx(slow_maj, abs=1e-12)
        assert expected_best(samples, k)[0] == pytest.approx(slow_best, abs=1e-12)
        assert expected_pass(samples, k)[0] == pytest.approx(slow_pass, abs=1e-12)


def test_many_samples_stay_exact():
    """Equally frequent answers win equally often, with 128 samples and up to 2.4e37 possible draws."""
    samples = encode([["A", "B", "C", "D"] * 32], ["A"])
    for k in (1, 2, 16, 64, 128):
        assert expected_maj(samples, k)[0] == pytest.approx(0.25, abs=1e-10)


def test_bad_k():
    for k in (0, 3):
        with pytest.raises(ValueError, match=rf"^k must be between 1 and the number of samples, 2; it is {k}\.$"):
            pass_at_k(2, 1, k)
    with pytest.raises(ValueError, match=r"num_correct must be between 0 .*2; it is 3"):
        pass_at_k(2, 3, 1)
    samples = encode([["1", "2"]], ["1"], [[0, 1]])
    for expected in (expected_pass, expected_maj, expected_best):
        for k in (0, 3):
            with pytest.raises(ValueError, match="k must be between 1"):
                expected(samples, k)
    assert expected_maj(encode([["1"] * 1_000], ["1"]), 2)[0] == pytest.approx(1)
    with pytest.raises(ValueError, match="at most 1000 samples"):
        expected_maj(encode([["1"] * 1_001], ["1"]), 2)
