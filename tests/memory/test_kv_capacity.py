"""KV block counts from plain numbers, and what is said when there is no room."""

import pytest

from xllm_npu.memory.kv_capacity import CacheRequest, CacheTooSmall, longest_sequence, num_kv_blocks

MIB = 2**20


def request(**changes):
    values = {"bytes_per_block": MIB, "block_size": 16, "max_model_len": 16384, "max_seqs": 64,
              "free_bytes": 1000 * MIB, "total_bytes": 1000 * MIB, "workspace_bytes": 100 * MIB, "utilization": 0.8}
    return CacheRequest(**{**values, **changes})


def test_what_is_free_less_the_reserve_and_the_workspace():
    assert num_kv_blocks(request()) == 700
    assert num_kv_blocks(request(free_bytes=600 * MIB)) == 300
    assert num_kv_blocks(request(utilization=1.0)) == 900


def test_limits_of_the_user_and_of_the_platform():
    assert num_kv_blocks(request(soft_limit_bytes=50 * MIB)) == 50
    assert num_kv_blocks(request(max_cache_bytes=200 * MIB, soft_limit_bytes=50 * MIB)) == 200
    assert num_kv_blocks(request(max_cache_bytes=900 * MIB)) == 900, "an explicit size is not cut by the ratio"


def test_graphs_get_their_part_first():
    assert num_kv_blocks(request(graph_bytes=150 * MIB)) == 550
    assert num_kv_blocks(request(max_cache_bytes=800 * MIB, graph_bytes=200 * MIB)) == 800
    with pytest.raises(CacheTooSmall, match="of which graphs take 201 MiB: lower max_cache_size"):
        num_kv_blocks(request(max_cache_bytes=800 * MIB, graph_bytes=201 * MIB))


def test_never_more_than_all_sequences_could_use():
    assert num_kv_blocks(request(max_model_len=17, max_seqs=3)) == 3 * 2 + 1


@pytest.mark.parametrize(("changes", "words"), [
    ({"max_cache_bytes": 2000 * MIB}, "lower max_cache_size"),
    ({"max_cache_bytes": 1024}, "max_cache_size is 1 KiB and a block takes 1 MiB"),
    ({"free_bytes": 250 * MIB}, "Raise max_memory_utilization or max_cache_size"),
])
def test_no_room_names_the_setting(changes, words):
    with pytest.raises(CacheTooSmall, match=words):
        num_kv_blocks(request(**changes))


def test_the_dummy_block_holds_no_tokens():
    assert longest_sequence(11, 16) == 160
