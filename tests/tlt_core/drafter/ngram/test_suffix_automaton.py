"""The automaton equals brute force over the trie of its sequences, however their growth is interleaved."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tlt_core.drafter.ngram.suffix_automaton import ROOT, SuffixAutomaton

Text = tuple[int, ...]


def grow(sequences: Sequence[Text], rng: random.Random) -> tuple[SuffixAutomaton, list[int]]:
    """Append the sequences' tokens in a random interleaving; returns their ends too."""
    automaton = SuffixAutomaton()
    ends, fed = [ROOT] * len(sequences), [0] * len(sequences)
    order = [index for index, sequence in enumerate(sequences) for _ in sequence]
    rng.shuffle(order)
    for index in order:
        ends[index] = automaton.append(ends[index], sequences[index][fed[index]])
        fed[index] += 1
    return automaton, ends


def random_sequences(rng: random.Random, *, alphabet: int, count: int, length: int) -> list[Text]:
    return [tuple(rng.randrange(alphabet) for _ in range(rng.randint(1, length))) for _ in range(count)]


def find(automaton: SuffixAutomaton, text: Text) -> int | None:
    state = ROOT
    for token in text:
        if token not in automaton.next[state]:
            return None
        state = automaton.next[state][token]
    return state


def occurrences(sequences: Sequence[Text]) -> Counter[Text]:
    """How often each non-empty substring occurs in all sequences together."""
    return Counter(s[i:j] for s in sequences for i in range(len(s)) for j in range(i + 1, len(s) + 1))


CASES = [(2, 1, 40), (2, 4, 14), (3, 5, 12), (6, 3, 20), (1, 3, 9)]  # alphabet, sequences, longest


@pytest.mark.parametrize(("alphabet", "count", "length"), CASES)
@pytest.mark.parametrize("seed", range(12))
def test_substrings_counts_and_continuations(alphabet, count, length, seed):
    """Every substring and nothing else is recognised; counts are exact; so are those of continuations."""
    rng = random.Random(seed)
    sequences = random_sequences(rng, alphabet=alphabet, count=count, length=length)
    automaton, _ = grow(sequences, rng)
    expected = occurrences(sequences)
    for text, times in expected.items():
        state = find(automaton, text)
        assert state is not None
        assert automaton.count[state] == times
        assert automaton.length[automaton.link[state]] < len(text) <= automaton.length[state]
        followed = {c: automaton.count[t] for c, t in automaton.next[state].items()}
        assert followed == {c: expected[(*text, c)] for c in range(alphabet) if (*text, c) in expected}
    paths = {ROOT: 1}  # distinct strings = distinct paths from the root: nothing but the substrings is recognised
    for state in sorted(range(len(automaton.link)), key=lambda s: automaton.length[s]):
        for target in automaton.next[state].values():
            paths[target] = paths.get(target, 0) + paths[state]
    assert sum(paths.values()) - 1 == len(expected)
    assert len(automaton.link) <= 2 * sum(map(len, sequences)) + 1


@pytest.mark.parametrize("seed", range(30))
def test_step_is_the_longest_suffix_that_occurs_while_the_index_grows(seed):
    """A foreign text is followed token by token, sequences growing in between."""
    rng = random.Random(seed)
    sequences = random_sequences(rng, alphabet=3, count=3, length=30)
    foreign = tuple(rng.randrange(3) for _ in range(40))
    automaton, ends, known = SuffixAutomaton(), [ROOT] * 3, [0] * 3
    state, matched = ROOT, 0
    for position, token in enumerate(foreign, start=1):
        followed, indexed = matched, occurrences([s[:k] for s, k in zip(sequences, known, strict=True)])
        state, matched = automaton.step(state, matched, token)
        assert find(automaton, foreign[position - matched : position]) == state
        suffixes = [n for n in range(1, followed + 2) if foreign[position - n : position] in indexed]
        assert matched == max(suffixes, default=0)  # of what was followed: the index may know more by now
        for index in range(3):
            if known[index] < len(sequences[index]) and rng.random() < 0.5:
                ends[index] = automaton.append(ends[index], sequences[index][known[index]])
                known[index] += 1
    final = occurrences(sequences)
    automaton, _ = grow(sequences, rng)
    state, matched = ROOT, 0
    for position, token in enumerate(foreign, start=1):
        state, matched = automaton.step(state, matched, token)
        assert matched == max(n for n in range(position + 1) if n == 0 or foreign[position - n : position] in final)
