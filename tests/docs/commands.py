"""The commands of the documents.

A command is a line of a fenced bash block, or a part of one between `;`, `&&` and `|`.  Words in capitals (TAG,
REPOSITORY) stand for the reader's own.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
ENDS = {";", "&&", "||", "|", "&", "(", ")"}
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
HEREDOC = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF\n", re.DOTALL | re.MULTILINE)
VARIABLE = re.compile(r"[A-Z_]+=")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def files_of(page: str) -> dict[str, str]:
    """What the page has its reader write: `cat > NAME <<'EOF'`."""
    return {name: text for block in BLOCK.findall(text_of(page)) for name, text in HEREDOC.findall(block)}


def commands_of(text: str) -> Iterator[list[str]]:
    """Words of each command, without variables set in front of it."""
    for command in lines_of(text):
        while command and VARIABLE.match(command[0]):
            command = command[1:]
        if command:
            yield command


def lines_of(text: str) -> Iterator[list[str]]:
    """Words of each command, with variables set in front of it."""
    for block in BLOCK.findall(text):
        pending = ""
        for line in HEREDOC.sub("", block).replace("\\\n", " ").splitlines():
            pending += line
            lexer = shlex.shlex(pending, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            try:
                words = list(lexer)
            except ValueError:  # a quotation goes on in the next line
                continue
            pending = ""
            while words:
                end = next((i for i, word in enumerate(words) if word in ENDS), len(words))
                command, words = words[:end], words[end + 1 :]
                if command:
                    yield command
        assert not pending, f"a quotation without end: {pending}"
