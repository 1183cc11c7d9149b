"""Pages of texts that come, grow and go: a token that is still seen keeps its slot."""

import numpy as np
import pytest

from meshdsl.generation.paging import PageTable


@pytest.mark.parametrize("window", [None, 1, 3, 8, 9])
@pytest.mark.parametrize("seed", range(4))
def test_each_token_that_is_seen_stays_in_its_slot(window, seed):
    rng = np.random.default_rng(seed)
    page, most, rows = 4, 23, 3
    table = PageTable(pages=12, rows=rows, most=most, window=window, page=page)
    texts, slots = [None] * rows, {}  # slots of each row's positions; the token in each slot
    ends = [0] * rows
    for _ in range(400):
        row = int(rng.integers(rows))
        if texts[row] is None and table.fits(read := int(rng.integers(1, most))):
            pages, texts[row], ends[row] = table.join(row, read), {}, read
            for position in range(read):
                if (number := pages[position // page]) >= 0:
                    texts[row][position] = number * page + position % page
                    slots[texts[row][position]] = row, position
        elif texts[row] is not None and (rng.random() < 0.1 or table.lacking):
            texts[row] = None
            table.leave(row)
        if table.lacking:
            continue
        for row, slot in enumerate(table.step()):
            if texts[row] is None:
                assert slot == -1
                continue
            if ends[row] == most:
                assert slot == -1
                texts[row] = None
                continue
            texts[row][ends[row]] = slot
            slots[slot] = row, ends[row]
            ends[row] += 1
        for row, text in enumerate(texts):
            for position, slot in (text or {}).items():
                if window is None or ends[row] - 1 - position < window:
                    assert slots[slot] == (row, position)
    for row in range(rows):
        table.leave(row)
    assert table.free == 12


def test_a_window_keeps_few_pages():
    table = PageTable(pages=3, rows=1, most=1000, window=8, page=4)
    table.join(0, 5)
    for _ in range(900):
        table.step()
        assert table.free <= 1  # two or three pages have the window


def test_a_text_that_finds_no_room_changes_nothing():
    table = PageTable(pages=4, rows=2, most=16, page=4)
    table.join(0, 5)
    table.join(1, 5)
    with pytest.raises(ValueError, match="a text of 13 tokens needs 4 pages; 2 are free"):
        table.join(0, 13)
    assert table.free == 0
    assert (table.step() >= 0).all()


def test_texts_may_join_as_long_as_those_before_them_leave_pages():
    table = PageTable(pages=8, rows=4, most=16, page=4)
    table.join(0, 5)  # 2 of the 8
    reads = [6, 3, 2, 2]
    count = table.joining(reads)
    for row, read in enumerate(reads[:count], 1):
        assert table.fits(read)
        table.join(row, read)
    assert count == 2 and not table.fits(reads[count])


def test_a_cache_has_room_for_one_text():
    with pytest.raises(ValueError, match="no room for a text of 17: it needs 20, in pages of 4"):
        PageTable(pages=4, rows=8, most=17, page=4)
    with pytest.raises(ValueError, match="no room"):
        PageTable(pages=2, rows=8, most=17, window=8, page=4)
    assert PageTable(pages=3, rows=8, most=17, window=8, page=4).fits(16)
