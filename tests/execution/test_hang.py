"""What a user reads when ranks wait for ever."""

from xllm_npu.execution.hang import RankProgress, describe_hang


def test_names_the_rank_that_did_not_arrive():
    text = describe_hang({0: RankProgress(7, 6, 100.0), 1: RankProgress(5, 5, 100.0)}, 30, 100.0)
    assert text == "A step has not ended after 30 s: rank 1 did not arrive at collective 7, where rank 0 waits."


def test_says_who_is_silent():
    ranks = {0: RankProgress(7, 6, 100.0), 1: RankProgress(7, 6, 99.9), 2: RankProgress(6, 6, 80.0), 3: None}
    assert describe_hang(ranks, 30, 100.0) == (
        "A step has not ended after 30 s: ranks 2, 3 did not arrive at collective 7, where ranks 0, 1 wait "
        "(ranks 2, 3 have given no sign of life).")


def test_everybody_waits_for_another_engine():
    ranks = {2: RankProgress(7, 6, 100.0), 3: RankProgress(7, 6, 100.0)}
    assert "ranks 2, 3 of this engine wait at collective 7" in describe_hang(ranks, 30, 100.0)
    assert "outside of any collective" in describe_hang({0: RankProgress(7, 7, 100.0)}, 30, 100.0)


def test_stopped_inside_the_collective():
    ranks = {0: RankProgress(7, 6, 100.0), 1: RankProgress(7, 6, 97.0)}
    assert describe_hang(ranks, 3, 100.0) == (
        "A step has not ended after 3 s: rank 1 has given no sign of life since coming to collective 7, "
        "where rank 0 waits.")
