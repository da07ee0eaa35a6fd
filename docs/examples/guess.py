"""An environment: the policy guesses a number, and hears whether it is higher or lower."""

import re


class Guess:
    """One episode.  The first right guess earns 1, each later one a fifth less."""

    def reset(self, *, prompt: str, answer: str, metadata: dict[str, object]) -> None:
        self._number, self._worth = int(answer), 1.0

    def step(self, text: str) -> tuple[str, float, bool]:
        said = re.search(r"\d+", text)
        if said is None:
            return "Say a number.", 0.0, False
        guess = int(said.group())
        if guess == self._number:
            return "Right.", self._worth, True
        self._worth -= 0.2
        return "Higher." if guess < self._number else "Lower.", 0.0, False
