"""The detector says what the plain rule says, at every token."""

import random

import pytest

from xllm_npu.state.repetition import RepetitionDetection, RepetitionDetector


def repeats(tokens, settings) -> bool:
    """Plain: some pattern length whose last min_count pieces are equal."""
    for size in range(max(1, settings.min_pattern_size), settings.max_pattern_size + 1):
        if size * settings.min_count > len(tokens):
            continue
        tail = tokens[len(tokens) - size * settings.min_count :]
        if tail == tail[:size] * settings.min_count:
            return True
    return False


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_plain_rule(seed):
    rng = random.Random(seed)
    high = rng.randint(1, 9)
    settings = RepetitionDetection(max_pattern_size=high, min_pattern_size=rng.randint(0, high),
                                   min_count=rng.randint(2, 4))
    detector, tokens, found = RepetitionDetector(settings), [], 0
    while len(tokens) < 2000:
        piece = [rng.randint(0, 2) for _ in range(rng.randint(1, high + 1))]
        for token in piece * rng.randint(1, settings.min_count + 1):
            tokens.append(token)
            said = detector.push(token)
            assert said == repeats(tokens, settings), tokens[-30:]
            found += said
    assert 0 < found < len(tokens)


def test_a_token_three_times():
    detector = RepetitionDetector(RepetitionDetection(max_pattern_size=4, min_count=3))
    assert [detector.push(t) for t in (7, 7, 8, 8, 8)] == [False, False, False, False, True]
