"""The draft vocabulary against counting by hand, its two tensors, and the mistakes seen in other checkpoints."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elsi_lib.errors import ElsiError
from elsi_lib.speculative.vocabulary import DraftVocabulary, count_tokens

counts_of = st.lists(st.integers(0, 4), min_size=1, max_size=30).filter(any)  # few values: many ties


@given(counts_of, st.data())
def test_the_most_frequent_ids_sorted_lower_ids_first(counts, data):
    size = data.draw(st.integers(1, sum(c > 0 for c in counts)))
    ranked = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    expected = sorted(ranked[:size])
    vocabulary = DraftVocabulary.from_counts(torch.tensor(counts), size)
    assert vocabulary.ids.tolist() == expected and vocabulary.ids.dtype == torch.long
    assert vocabulary.coverage == pytest.approx(sum(counts[i] for i in expected) / sum(counts))
    assert (vocabulary.size, vocabulary.target_size) == (size, len(counts))
    assert vocabulary.d2t.tolist() == [target - i for i, target in enumerate(expected)]
    assert vocabulary.t2d.tolist() == [i in expected for i in range(len(counts))] and vocabulary.t2d.dtype == torch.bool
    assert vocabulary.draft_ids.tolist() == [expected.index(i) if i in expected else -1 for i in range(len(counts))]
    same = DraftVocabulary.from_counts({i: c for i, c in enumerate(counts) if c}, size, target_size=len(counts))
    assert same.ids.tolist() == expected and same.coverage == vocabulary.coverage


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(41, 60))
def test_the_tensors_come_back(ids, target_size):
    vocabulary = DraftVocabulary(torch.tensor(sorted(ids)), target_size)
    for mask in (vocabulary.t2d, vocabulary.t2d.to(torch.uint8)):
        back = DraftVocabulary.from_tensors(vocabulary.d2t, mask)
        assert back.ids.tolist() == sorted(ids) and back.target_size == target_size and back.coverage is None


@given(st.sets(st.integers(0, 40), min_size=2))
def test_plain_ids_in_d2t_are_told_apart(ids):
    vocabulary = DraftVocabulary(torch.tensor(sorted(ids)), 41)
    with pytest.raises(ElsiError, match="d2t of draft X holds plain target ids, not offsets"):
        DraftVocabulary.from_tensors(vocabulary.ids, vocabulary.t2d, "draft X")


@given(counts_of)
def test_the_whole_vocabulary_may_hold_ids_that_never_occur(counts):
    vocabulary = DraftVocabulary.from_counts(counts, len(counts))
    assert vocabulary.ids.tolist() == DraftVocabulary.whole(len(counts)).ids.tolist() == list(range(len(counts)))
    assert vocabulary.coverage == 1 and not vocabulary.d2t.any() and vocabulary.t2d.all()


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()))))
def test_only_loss_positions_are_counted(texts):
    expected = Counter(token for text in texts for token, wanted in text if wanted)
    counts = count_tokens((([t for t, _ in text], [m for _, m in text]) for text in texts), 10)
    assert counts.tolist() == [expected[i] for i in range(10)]


def test_wrong_counts_and_sizes():
    for counts, size, message in [
        ([0, 0, 0], 1, "no tokens at loss positions"),
        ([1, 2, 3], 0, "draft vocabulary of 0 ids: between 1 and the target's 3"),
        ([1, 2, 3], 4, "draft vocabulary of 4 ids: between 1 and the target's 3"),
        ([1, 0, 3, 0], 3, "only 2 ids occur at loss positions: ask for at most 2, or for all 4"),
        ([1, -2, 3], 1, "negative count for token id 1"),
        ([0.5, 0.5], 1, "one whole number for each id"),
        ([[1, 2]], 1, "one whole number for each id"),
    ]:
        with pytest.raises(ElsiError, match=message):
            DraftVocabulary.from_counts(torch.tensor(counts), size)
    with pytest.raises(ElsiError, match="give target_size"):
        DraftVocabulary.from_counts({1: 2}, 1)
    with pytest.raises(ElsiError, match="token id 7 outside 0..4"):
        DraftVocabulary.from_counts({7: 2}, 1, target_size=5)
    with pytest.raises(ElsiError, match="one whole number for each id"):
        DraftVocabulary.from_counts([1, 2], 1, target_size=5)
    with pytest.raises(ElsiError, match="text 1: 2 token ids and a loss mask of 1"):
        count_tokens([([1], [True]), ([1, 2], [True])], 5)
    with pytest.raises(ElsiError, match="text 0: token id 5 outside 0..4"):
        count_tokens([([1, 5], [True, True])], 5)
    assert count_tokens([([1, 5], [True, False])], 5).tolist() == [0, 1, 0, 0, 0]  # not at a loss position


def test_wrong_ids():
    for ids, message in [
        ([], "a vector of target ids"),
        ([[1, 2]], "a vector of target ids"),
        ([0.0, 1.0], "a vector of target ids"),
        ([-1, 2], "target id -1 of the draft vocabulary outside 0..9"),
        ([1, 10], "target id 10 of the draft vocabulary outside 0..9"),
        ([2, 1], "do not increase"),
        ([1, 1], "do not increase"),
    ]:
        with pytest.raises(ElsiError, match=message):
            DraftVocabulary(torch.tensor(ids), 10)


def test_inconsistent_tensors():
    vocabulary = DraftVocabulary(torch.tensor([1, 4, 5]), 8)
    d2t, t2d = vocabulary.d2t, vocabulary.t2d
    more, other = t2d.clone(), t2d.clone()
    more[7] = True
    other[4], other[3] = False, True
    for pair, message in [
        ((d2t, more), "t2d of the checkpoint marks 4 ids, not the 3 that d2t names"),
        ((d2t, other), "t2d of the checkpoint .*do not belong together"),
        ((d2t, t2d[:5]), "target id 5 of the draft vocabulary outside 0..4"),
        ((d2t[:2], t2d), "marks 3 ids, not the 2"),
        ((torch.tensor([5, 3, -1]), t2d), "do not increase"),
        ((torch.tensor([-1, 3, 3]), t2d), "target id -1"),
        ((d2t.float(), t2d), "whole offsets"),
        ((d2t, t2d.float()), "whole offsets"),
        ((d2t[None], t2d), "whole offsets"),
        ((d2t[:0], t2d), "a vector of target ids"),
    ]:
        with pytest.raises(ElsiError, match=message):
            DraftVocabulary.from_tensors(*pair)
