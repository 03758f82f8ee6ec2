import pytest

from mllm_compile.runtime.attention.metadata import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    KVCacheSpec,
    get_kv_cache_layout,
    split_decodes_and_prefills,
)
from mllm_compile.runtime.forward_batch import ForwardMode
from tests.runtime.attention.attention_cases import make_case, make_layer

LAYER = make_layer()


def test_common_metadata_of_a_mixed_batch():
    batch = make_case(LAYER, [6, 0, 3], [1, 5, 2]).batch
    common = CommonAttentionMetadata.of(batch)
    assert batch.forward_mode is ForwardMode.MIXED
    assert common.query_start_loc_cpu.tolist() == [0, 1, 6, 8]
    assert common.num_computed_tokens_cpu.tolist() == [6, 0, 3]
    assert common.seq_lens_cpu.tolist() == [7, 5, 5]
    assert (common.num_reqs, common.num_actual_tokens, common.max_query_len) == (3, 8, 5)
    assert CommonAttentionMetadata.of(batch) is common, "made once per batch"


def test_common_metadata_of_a_decode_batch():
    common = CommonAttentionMetadata.of(make_case(LAYER, [6, 2], [1, 1]).batch)
    assert common.query_start_loc_cpu.tolist() == [0, 1, 2]
    assert common.num_computed_tokens_cpu.tolist() == [6, 2]


def test_a_batch_without_host_copies_is_refused_with_the_way_to_make_one():
    batch = make_case(LAYER, [6], [3]).batch
    batch.extend_seq_lens_cpu = None
    with pytest.raises(RuntimeError, match="prepare_forward_batch_extend"):
        _ = CommonAttentionMetadata.of(batch)


@pytest.mark.parametrize(
    ("new_lens", "expected"),
    [
        ([1, 1, 1], (3, 0, 3, 0)),
        ([1, 1, 4], (2, 1, 2, 4)),
        ([3, 4], (0, 2, 0, 7)),
        ([1, 4, 1], (1, 2, 1, 5)),
        ([2, 1], (0, 2, 0, 3)),
    ],
)
def test_leading_single_tokens_are_decodes_and_the_rest_prefills(new_lens, expected):
    assert (
        split_decodes_and_prefills(CommonAttentionMetadata.of(make_case(LAYER, [2] * len(new_lens), new_lens).batch))
        == expected
    )


def test_the_threshold_of_what_counts_as_a_decode_can_be_raised():
    common = CommonAttentionMetadata.of(make_case(LAYER, [2, 2, 2], [2, 1, 4]).batch)
    assert split_decodes_and_prefills(common, decode_threshold=2) == (2, 1, 3, 4)


@pytest.mark.parametrize(
    ("prefix", "new", "is_so"),
    [([0], [7], True), ([0, 0], [7, 1], True), ([0, 3], [7, 2], False), ([0], [1], False), ([5, 0], [1, 9], False)],
)
def test_a_batch_is_fresh_if_it_is_prompts_alone_without_cached_tokens(prefix, new, is_so):
    assert CommonAttentionMetadata.of(make_case(LAYER, prefix, new).batch).is_fresh is is_so


def test_the_builder_gives_every_layer_the_same_metadata():
    layers = (make_layer(), make_layer(layer_id=1))
    builder = AttentionMetadataBuilder(KVCacheSpec(layers, page_size=4))
    batch = make_case(LAYER, [6, 0], [1, 5]).batch
    metadata = builder.build(0, CommonAttentionMetadata.of(batch))
    assert list(metadata) == ["layer0", "layer1"]
    assert metadata["layer0"] is metadata["layer1"]
    assert metadata["layer0"].batch is batch
    assert metadata["layer0"].num_actual_tokens == 6


def test_a_common_prefix_is_whole_pages_before_the_last_token_of_every_decode():
    builder = AttentionMetadataBuilder(KVCacheSpec((make_layer(),), page_size=4))
    common = CommonAttentionMetadata.of(make_case(LAYER, [12, 8, 0], [1, 1, 5]).batch)
    assert list(builder.build(8, common)) == ["layer0"]
    for wrong in (6, 12):  # half a page; as much as the second decode has
        with pytest.raises(ValueError, match=f"whole pages of 4 tokens, fewer than the 9 .*, got {wrong}"):
            builder.build(wrong, common)
    with pytest.raises(ValueError, match="fewer than the 0"):  # there is no decode
        builder.build(4, CommonAttentionMetadata.of(make_case(LAYER, [8, 8], [3, 5]).batch))


def test_the_layout_of_a_page_is_the_pool_s():
    assert get_kv_cache_layout() == "NHD"
