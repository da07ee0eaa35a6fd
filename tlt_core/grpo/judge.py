"""Another model as a reward: asked over HTTP, as OpenAI-compatible servers (vLLM, SGLang) answer.

Runs in scoring processes, with the standard library alone.  An answer of 429 or 5xx, or none at all, is tried again;
the scoring pool's time limit ends what takes too long.
"""

import functools
import json
import os
import re
import time
import urllib.error
import urllib.request

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_WAIT_S = 0.25  # before the first retry; doubled each time
_BUSY = (408, 409, 425, 429)


class NoScore(ValueError):
    """The judge said no number."""


def ask(settings: str, *, prompt: str, response: str, answer: str) -> float:
    """The last number of the judge's reply.  settings: `conf.reward.JudgeConfig` as JSON.

    Raises NoScore, and OSError when the judge cannot be reached or refuses."""
    judge = json.loads(settings)
    parts = {"{prompt}": prompt, "{response}": response, "{answer}": answer}
    text = re.sub("|".join(map(re.escape, parts)), lambda found: parts[found[0]], judge["prompt"])
    found = _NUMBER.findall(_reply(settings, text))
    if not found:
        raise NoScore("the judge's reply has no number")
    return float(found[-1])


@functools.lru_cache(maxsize=4096)
def _reply(settings: str, text: str) -> str:
    """Kept, so that equal responses are judged once in a scoring process."""
    judge = json.loads(settings)
    body = {
        "model": judge["model"],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": judge["max_tokens"],
        "temperature": 0.0,
    }
    headers = {"Content-Type": "application/json"}
    if name := judge["key_variable"]:
        if name not in os.environ:
            raise OSError(f"the judge's key, {name}, is not set here: set it, and name it in reward.pass_variables")
        headers["Authorization"] = f"Bearer {os.environ[name]}"
    url = judge["url"].rstrip("/") + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    for attempt in range(judge["retries"] + 1):
        if attempt:
            time.sleep(_WAIT_S * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request) as answer:
                told = json.load(answer)
            return str(told["choices"][0]["message"]["content"] or "")
        except urllib.error.HTTPError as error:
            why = OSError(f"the judge at {url} answers {error.code}: {error.read(200).decode(errors='replace')!r}")
            if error.code < 500 and error.code not in _BUSY:
                raise why from None
        except (OSError, json.JSONDecodeError) as error:
            why = OSError(f"the judge at {url} does not answer ({error})")
        except (KeyError, IndexError, TypeError):
            raise OSError(f"the judge at {url} answers something else than a chat completion") from None
    raise why
