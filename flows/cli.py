"""The command `tlt`: `_parser.py` reads the command line, `_commands.py` has a function for each command.

Imports of torch, Prefect and MLflow wait until a command needs them: help and configuration errors take a fraction of
a second.  Every failure that a user can cause is one paragraph on stderr and an exit code (see `_errors.py`).
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from conf.load import load
from flows import _environment, _errors, _logging, _stopping
from flows._commands import ON_CONFIG, OTHERS
from flows._parser import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parse(argv)
    _environment.set_defaults()
    _logging.attach_terminal()
    for number in (signal.SIGTERM, signal.SIGINT):  # `kill` ends a command like Ctrl-C, with everything closed
        signal.signal(number, _stopping.end_at_once)
    run_dir: Path | None = None
    try:
        if args.command in OTHERS:
            return OTHERS[args.command](args) or 0
        cfg = load(args.config, args.overrides)
        run_dir = cfg.run_dir
        ON_CONFIG[args.command](cfg, args)
    except BaseException as error:
        report = _errors.explain(error, run_dir=run_dir)
        if report is None:
            raise
        print(f"tlt {args.command}: {report.text}", file=sys.stderr)
        return report.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
