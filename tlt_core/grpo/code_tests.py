"""Does the code of a response pass its tests?  It runs in a Python of its own, which sees no network, no other process
and no variables, and may use little time, memory and disk.

The tests are the reference answer: statements such as `assert add(1, 2) == 3` (MBPP; a JSON list of them, too), a
function `check` that is called with the one named by the row's `entry_point` (HumanEval), or a JSON object
{"inputs": [...], "outputs": [...]} of what a program reads and has to print (APPS, TACO).

This keeps mistakes and clumsy code away from the machine.  It does not hold back code that means harm.
"""

import json
import re
import resource
import secrets
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from typing import Any

MOST_MEMORY_GB = 1.0
_MOST_FILE = 16 << 20
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_APART = ("unshare", "--user", "--net", "--pid", "--fork", "--kill-child")  # from util-linux
# Runs the code it is given, then the tests; only then it says the word, which the code cannot know.
_RUNNER = """
import json, sys
code, tests, word = json.load(sys.stdin)
known = {"__name__": "response"}
exec(compile(code, "response", "exec"), known)
exec(compile(tests, "tests", "exec"), known)
print(word, file=sys.__stdout__, flush=True)
"""


class NoCode(ValueError):
    """The response holds no code."""


class Unusable(ValueError):
    """Tests that cannot be read, or a machine that cannot keep code apart."""


def passes(response: str, tests: str, *, timeout_s: float, entry_point: str = "") -> bool:
    """Whether all tests pass, within `timeout_s` together.  entry_point: the function that they are for, where they do
    not name it.  Raises NoCode, Unusable."""
    blocks = _BLOCK.findall(response)
    if not blocks:
        raise NoCode("no ```python block in the response")
    code, until_s = textwrap.dedent(blocks[-1]), time.monotonic() + timeout_s
    given = _parsed(tests, entry_point)
    if isinstance(given, str):
        word = secrets.token_hex(16)
        said = _run(["-c", _RUNNER], json.dumps([code, given, word]), until_s)
        return said is not None and said.rstrip().endswith(word)
    return all(_matches(_run(["-c", code], read, until_s), wanted) for read, wanted in given)


def require_apart() -> None:
    """Raises Unusable where this machine cannot run code apart."""
    try:
        done = subprocess.run([*_APART, "true"], capture_output=True, text=True, check=False)
        problem = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError:
        problem = "there is no unshare; install util-linux"
    if problem:
        raise Unusable(f"code cannot run without network here ({problem}); allow user namespaces (a container may need "
                       "--security-opt seccomp=unconfined), or give a function of yours (kind: python)")  # fmt: skip


def _parsed(tests: str, entry_point: str) -> str | list[tuple[str, str]]:
    try:
        given: Any = json.loads(tests)
    except ValueError:
        if "def check(" not in tests or len(re.findall(r"\bcheck\(", tests)) > 1:
            return tests
        if not entry_point:
            raise Unusable("the tests define `check` and do not call it; give the row an `entry_point`") from None
        return f"{tests}\ncheck({entry_point})\n"
    if isinstance(given, list) and given and all(isinstance(line, str) for line in given):
        return "\n".join(given)
    reads, prints = (given.get(name, ()) if isinstance(given, dict) else () for name in ("inputs", "outputs"))
    if reads and len(reads) == len(prints) and "fn_name" not in given:
        return [(_lines(read), _lines(wanted)) for read, wanted in zip(reads, prints, strict=True)]
    raise Unusable(
        f"the tests are {tests[:60]!r}; give statements, a list of them, or {{inputs: [..], outputs: [..]}} of a "
        "program"
    )


def _lines(text: Any) -> str:
    """Some data sets have a list of lines."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _matches(said: str | None, wanted: str) -> bool:
    """Line by line, but for spaces at their ends."""
    return said is not None and [x.rstrip() for x in said.strip().splitlines()] == [
        x.rstrip() for x in wanted.strip().splitlines()
    ]


def _run(arguments: list[str], read: str, until_s: float) -> str | None:
    """What a Python with these arguments prints; None where it fails or the time is up."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        return None
    with tempfile.TemporaryDirectory(prefix="tlt-code-") as folder, tempfile.TemporaryFile(dir=folder) as out:
        process = subprocess.Popen(
            [*_APART, sys.executable, "-I", *arguments],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=_limits(left_s),
        )
        try:
            process.communicate(read, timeout=left_s)
        except (subprocess.TimeoutExpired, UnicodeError):
            process.kill()  # all that it has started ends with it
            process.wait()
            return None
        out.seek(0)
        return None if process.returncode else out.read().decode(errors="replace")


def _limits(seconds: float) -> Callable[[], None]:
    def limit() -> None:
        memory = int(MOST_MEMORY_GB * 1e9)
        for which, most in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, _MOST_FILE),
            (resource.RLIMIT_CPU, int(seconds) + 1),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(which, (most, most))

    return limit
