"""Generalised suffix automaton of sequences that grow token by token, in any interleaving.

The sequences are the paths of a trie; sequences with the same beginning share it.  endpos(w) are the trie nodes where
an occurrence of w ends.  A state is a class of strings with the same endpos, each a suffix of the longest.  Its link
leads to the class of the longest suffix that also occurs elsewhere.  So:

    next[s][c]         the state of wc, for every string w of state s
    length[s]          tokens of the longest string; the shortest has length[link[s]] + 1
    count[s]           occurrences, repeated visits of the same trie node included
    count[next[s][c]]  how often w was followed by c

Appending c to a sequence whose whole text is the longest string of `last` makes at most two states and costs O(1)
amortised (Blumer et al. 1985; for several sequences Mohri, Moreno, Weinstein 2009).  Several ends can grow at once: a
whole sequence is always the longest string of its class, because nothing can precede its first token.  A split takes
only shorter strings out of a class, so every `last` stays valid.

Counting walks at most `_COUNT_DEPTH` links up from the new end.  Only a text that repeats itself many times needs more;
there the counts of short strings become too small.
"""

ROOT = 0  # the empty string
_COUNT_DEPTH = 64


class SuffixAutomaton:
    """See the module docstring.  Read the lists, never write to them."""

    __slots__ = ("_clock", "count", "length", "link", "next", "recent")

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.recent = [0]  # number of the latest append that saw the string: orders states by age
        self._clock = 0

    def is_new(self, last: int, token: int) -> bool:
        """Whether `append` would make a state; if not, another sequence has the same beginning."""
        target = self.next[last].get(token)
        return target is None or self.length[target] != self.length[last] + 1

    def append(self, last: int, token: int) -> int:
        """Append to the sequence that ends in `last` (ROOT: a new sequence).  Returns its new end."""
        target = self.next[last].get(token)
        if target is None:
            end = self._branch(last, token)
        elif self.length[target] == self.length[last] + 1:
            end = target
        else:
            end = self._split(last, token, target)
        self._visit(end)
        return end

    def step(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Follow a text that is not part of the index.

        (state, matched): its longest suffix that occurs in the index, as the state that holds it and its length.
        Returns the same after `token`.  Appends in between are allowed.
        """
        next_, link, length = self.next, self.link, self.length
        while state != ROOT and (token not in next_[state] or matched <= length[link[state]]):
            state = link[state]  # in the second case the state was split, and its link holds the string now
            matched = min(matched, length[state])
        target = next_[state].get(token)
        return (ROOT, 0) if target is None else (target, matched + 1)

    def _branch(self, last: int, token: int) -> int:
        """Add a string that has not occurred yet."""
        end = self._add({}, self.length[last] + 1)
        state, next_ = last, self.next
        while state >= 0 and token not in next_[state]:
            next_[state][token] = end
            state = self.link[state]
        if state < 0:
            self.link[end] = ROOT
            return end
        target = next_[state][token]
        if self.length[target] != self.length[state] + 1:
            target = self._split(state, token, target)
        self.link[end] = target
        return end

    def _split(self, state: int, token: int, target: int) -> int:
        """Move the strings of `target` up to the longest of `state` plus `token` into a new state."""
        next_, link = self.next, self.link
        part = self._add(dict(next_[target]), self.length[state] + 1)
        link[part], link[target] = link[target], part
        self.count[part], self.recent[part] = self.count[target], self.recent[target]
        while state >= 0 and next_[state].get(token) == target:
            next_[state][token] = part
            state = link[state]
        return part

    def _add(self, transitions: dict[int, int], length: int) -> int:
        self.next.append(transitions)
        self.link.append(ROOT)
        self.length.append(length)
        self.count.append(0)
        self.recent.append(0)
        return len(self.link) - 1

    def _visit(self, end: int) -> None:
        """One more occurrence of every suffix."""
        link, count, recent = self.link, self.count, self.recent
        self._clock += 1
        clock, state = self._clock, end
        for _ in range(_COUNT_DEPTH):
            if state <= ROOT:
                return
            count[state] += 1
            recent[state] = clock
            state = link[state]
