"""Steps as records: what a follower reads is what rank 0 wrote, in order, and no more than a ring's worth ahead."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mllm_compile.runtime.media.step_plan import MediaPlan
from mllm_compile.runtime.ranks.records import SamplingMode, StepRecord, most_record_bytes, read_step, write_step
from mllm_compile.runtime.ranks.ring import RingReader, RingWriter
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch


def batch(step_id: int = 3, prefill: tuple[int, ...] = (7, 8, 9), pages: int = 2) -> ScheduledBatch:
    int32 = {"dtype": np.int32}
    return ScheduledBatch(
        step_id=step_id,
        requests=[None, None],  # type: ignore[list-item]
        rows=np.array([1, 4], **int32),
        num_new=np.array([1, len(prefill)], **int32),
        prefix_lens=np.array([5, 0], **int32),
        num_decodes=1,
        num_tokens=1 + len(prefill),
        page_rows=np.full(pages, 4, **int32),
        page_positions=np.arange(pages, **int32),
        page_ids=np.arange(pages, **int32) + 11,
        cleared_pages=np.array([11], **int32),
        prefill_token_ids=np.array(prefill, dtype=np.int64),
        sample_mask=np.array([True, False]),
        rope_lens=np.array([0, 9], **int32),
        adapter_slots=np.array([2, -1], **int32),
        prompt_logprob_rows=np.array([False, True]),
        admitted=[],
        state_restores=np.array([[9, 4]], dtype=np.int64),
        state_saves=np.array([[4, 8], [1, 7]], dtype=np.int64),
    )


MEDIA = MediaPlan(
    positions=np.arange(4),
    deltas=np.array([-3, 0], dtype=np.int32),
    rows=np.array([0, 5, 6, 0]),
    axes=np.arange(12).reshape(3, 4),
    runs=(np.array([5, 6]), np.array([7])),
)
MOVED = MediaPlan(positions=np.arange(4), deltas=np.array([-3, 0], dtype=np.int32))


@pytest.mark.parametrize("media", [None, MEDIA, MOVED], ids=["text", "images", "behind images"])
@pytest.mark.parametrize("scored", [None, np.array([1, 2], dtype=np.int64), np.empty(0, dtype=np.int64)])
def test_a_step_is_read_as_it_was_written(scored, media):
    memory = memoryview(bytearray(4096))
    size = write_step(memory, StepRecord(batch(), scored, media, SamplingMode.GREEDY_ACROSS_RANKS))
    found = read_step(memory[:size])
    assert found.choice is SamplingMode.GREEDY_ACROSS_RANKS
    assert (found.batch.step_id, found.batch.num_decodes, found.batch.num_tokens) == (3, 1, 4)
    assert found.batch.num_requests == 2
    copies = ("state_restores", "state_saves")
    pages = ("page_rows", "page_positions", "page_ids", "cleared_pages")
    for name in ("rows", "num_new", "prefix_lens", "rope_lens", *pages, *copies):
        ours, theirs = getattr(found.batch, name), getattr(batch(), name)
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)
    assert found.batch.prefill_token_ids.tolist() == [7, 8, 9]
    assert found.batch.sample_mask.tolist() == [True, False]
    assert not found.batch.prompt_logprob_rows.any()  # scores are rank 0's
    assert (found.scored_indices is None) == (scored is None)
    assert scored is None or np.array_equal(found.scored_indices, scored)
    assert (found.media is None) == (media is None)
    if media is not None:
        assert found.media.deltas.dtype == np.int32 and len(found.media.runs) == len(media.runs)
        for name in ("positions", "deltas", "rows", "axes"):
            assert np.array_equal(getattr(found.media, name), getattr(media, name))
        assert all(np.array_equal(*pair) for pair in zip(found.media.runs, media.runs, strict=True))


def test_the_largest_step_fits_and_a_larger_one_is_an_error():
    most = most_record_bytes(max_num_tokens=4, max_rows=2, pages_of_row=1)
    memory = memoryview(bytearray(most))
    assert write_step(memory, StepRecord(batch(), np.arange(4), MEDIA)) <= most
    with pytest.raises(ValueError, match="buffer"):
        write_step(memory, StepRecord(batch(prefill=tuple(range(100_000)))))


def test_followers_read_every_step_in_order_and_the_writer_waits_for_the_slowest():
    writer = RingWriter(num_followers=2, most_bytes=1024)
    readers = [RingReader(writer.place(follower)) for follower in range(2)]
    waited, may_read = threading.Event(), threading.Event()
    steps: list[list[int]] = [[], []]

    def read(follower: int) -> None:
        if follower == 1:
            may_read.wait()
        while (record := readers[follower].next()) is not None:
            steps[follower].append(record.batch.step_id)
            readers[follower].done()

    threads = [threading.Thread(target=read, args=(follower,)) for follower in range(2)]
    for thread in threads:
        thread.start()

    def check() -> None:  # only called where there is no room
        waited.set()
        may_read.set()

    for step_id in range(20):
        writer.write(StepRecord(batch(step_id)), check)
    assert waited.is_set()
    while (writer._read_counts < 20).any():  # the end is written where there is room
        pass
    writer.end()
    for thread in threads:
        thread.join()
    writer.close()
    assert steps == [list(range(20))] * 2


def test_messages_of_any_length_come_between_steps_and_share_their_order():
    writer = RingWriter(num_followers=1, most_bytes=1024)
    reader = RingReader(writer.place(0))
    long = [bytes([index % 251]) * (3001 + index) for index in range(30)]  # many times what a record holds
    read: list[object] = []

    def follow() -> None:
        while (record := reader.next()) is not None:
            read.append(record.batch.step_id if isinstance(record, StepRecord) else bytes(record))
            reader.done()

    thread = threading.Thread(target=follow)
    thread.start()
    writer.write(StepRecord(batch(1)), lambda: None)
    writer.write_message([memoryview(part) for part in long], lambda: None)
    writer.write_message([memoryview(b""), memoryview(b"short")], lambda: None)
    writer.write(StepRecord(batch(2)), lambda: None)
    while not writer._has_room or writer._read_counts.min() < writer._written:
        time.sleep(0.001)
    writer.end()
    thread.join()
    writer.close()
    assert read == [1, b"".join(long), b"short", 2]


def test_a_writer_that_waits_for_a_rank_that_is_gone_hears_of_it():
    writer = RingWriter(num_followers=1, most_bytes=1024)

    def check() -> None:
        raise RuntimeError("rank 1 ended")

    with pytest.raises(RuntimeError, match="rank 1 ended"):
        for step_id in range(20):
            writer.write(StepRecord(batch(step_id)), check)
    writer.close()
