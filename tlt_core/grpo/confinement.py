"""What a scoring process must not do: see the driver's passwords, or take the machine's memory.

A reward function is the user's code and runs as the user: this keeps secrets out of logs, tracebacks and libraries that
look for them, and one greedy response from ending the run.  It does not hold back code that means harm.

Only the standard library is imported, so a scoring process starts quickly.
"""

import os
import re
import resource
from collections.abc import Collection, Mapping

_SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|_PWD$|CREDENTIAL|(API|ACCESS|ACCOUNT|PRIVATE)_?KEY|AUTH(?!OR)|WEBHOOK"
    r"|^(AWS|AZURE|DATABRICKS|GOOGLE|MLFLOW_TRACKING|PREFECT_API)_|^TLT_NOTIFY_URL$",
    re.IGNORECASE,
)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s]*@")


def secrets(environment: Mapping[str, str], *, but: Collection[str] = ()) -> list[str]:
    """Names of the variables that look like secrets, by name or as a URL with a password; without those in `but`."""
    found = (n for n, value in environment.items() if _SECRET_NAME.search(n) or _URL_WITH_PASSWORD.search(value))
    return sorted(set(found) - set(but))


def confine(*, max_memory_gb: float, pass_variables: Collection[str]) -> None:
    """Call it in a new scoring process, before user code is imported.  A lower limit of the system stays."""
    for name in secrets(os.environ, but=pass_variables):
        del os.environ[name]
    # OpenBLAS reserves 40 MB for each of its threads when numpy is imported, which counts.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    most, given = int(max_memory_gb * 1e9), resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = most if given == resource.RLIM_INFINITY else min(most, given)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def limit_gb() -> float:
    """Most memory that this process may take, in GB; infinite without a limit."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return float("inf") if most == resource.RLIM_INFINITY else most / 1e9
