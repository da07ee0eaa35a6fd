"""The command `tlt`: `_parser.py` reads the command line, `_commands.py` has a function for each command.

Imports of torch, Prefect and MLflow wait until a command needs them: help and configuration errors take a fraction of
a second.  Every failure that a user can cause is one paragraph on stderr and an exit code (see `_errors.py`).
"""

import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from conf.load import load
from flows import _commands, _environment, _errors, _logging, _stopping
from flows._parser import parse

log = logging.getLogger("flows.cli")  # __name__ may be __main__, which is no logger of ours


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    for number in (signal.SIGTERM, signal.SIGINT):  # `kill` ends a command like Ctrl-C, with everything closed
        signal.signal(number, _stopping.end_at_once)
    run_dir: Path | None = None
    as_json = False
    try:
        as_json = _logging.is_json()
        _environment.set_defaults()
        _logging.attach_terminal()
        command = getattr(_commands, args.command.replace("-", "_"))
        if "overrides" not in args:
            return command(args) or 0
        cfg = load(args.config, args.overrides)
        run_dir = cfg.run_dir
        return command(cfg, args) or 0
    except BaseException as error:
        known = _errors.explain(error, run_dir=run_dir)
        if known is None:
            raise
        text, exit_code = f"tlt {args.command}: {known[0]}", known[1]
        if as_json:
            log.error("%s", text)
        else:
            print(text, file=sys.stderr)
        return exit_code


if __name__ == "__main__":
    sys.exit(main())
